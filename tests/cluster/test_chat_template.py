"""Chat templates: transformers' dialect, in a sandbox, with bounds that hold for every program."""

from __future__ import annotations

import subprocess
from typing import Any
from unittest.mock import Mock

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from octavo.cluster.api.chat.render import Chat, TemplateSource
from octavo.cluster.api.chat.template import OPERATORS_LIMITS, ChatTemplate, RenderLimitExceeded, RenderLimits
from octavo.cluster.api.chat.template_process import render_untrusted
from octavo.worker.errors import InvalidRequest

MESSAGES = [{"role": "user", "content": " 안녕 <b> "}, {"role": "assistant", "content": "x"}]
SHORT = RenderLimits(cpu_s=0.05, max_chars=10_000)
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"


def render(source: str, limits: RenderLimits = OPERATORS_LIMITS, **variables: Any) -> str:
    return ChatTemplate(source).render(variables, limits)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}\n  {{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}\n",
        "{%- for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ loop.length }}{{ m }}{% endfor -%}",
        "{% for m in messages if m.role == 'user' %}{{ loop.revindex }}{{ m | tojson(indent=2) }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% macro say(x) %}[{{ x }}{{ caller() if caller }}]{% endmacro %}{{ say(1) }}{% call say(2) %}!{% endcall %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ tools }}{{ unknown }}",
        "{% for x in [[1], [2, [3]]] recursive %}{{ x if x is number else loop(x) }}{% else %}none{% endfor %}",
    ],
)
def test_templates_write_what_they_do_in_transformers(source: str) -> None:
    expected, _ = render_jinja_template([MESSAGES], chat_template=source)
    assert render(source, messages=MESSAGES, tools=None) == expected[0]


def test_the_variables_of_a_template_are_what_it_reads_of_what_it_is_given() -> None:
    source = "{% for m in messages %}{{ m.x }}{{ raise_exception('') if thinks }}{% endfor %}{% set y = 1 %}{{ y }}"
    assert ChatTemplate(source).variables == {"messages", "thinks"}


@pytest.mark.parametrize(
    "source",
    [
        LOOPS,
        LOOPS.replace("BODY", ""),
        LOOPS.replace("BODY", "{% set x = 1 %}"),
        "{% for a in range(99999) if range(999) | list | length == 0 %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for x in [1] recursive %}{{ loop([1, 1]) if loop.depth < 60 }}{% endfor %}",
    ],
)
def test_no_program_runs_for_ever(source: str) -> None:
    with pytest.raises(RenderLimitExceeded):
        render(source, SHORT)


def test_a_template_writes_so_much_and_no_more() -> None:
    with pytest.raises(RenderLimitExceeded, match="more than 10000 characters"):
        render("{% for i in range(200) %}{{ text }}{% endfor %}", RenderLimits(max_chars=10_000), text="x" * 100)


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__ }}"])
def test_a_template_sees_nothing_of_the_interpreter(source: str) -> None:
    with pytest.raises(jinja2.TemplateError):
        render(source)


def ask(source: str) -> str:
    chat = Chat([{"role": "user", "content": "Hi"}])
    return render_untrusted(TemplateSource({"default": source}, {"bos_token": "<s>"}), chat, SHORT)


def test_case_bug_019_a_request_s_template_is_rendered_in_a_process_of_its_own() -> None:
    assert ask("{{ bos_token }}{% for m in messages %}{{ m.content }}!{% endfor %}") == "<s>Hi!"


def test_a_request_s_template_runs_where_no_secret_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    run = Mock(side_effect=subprocess.TimeoutExpired("python", 1))
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(InvalidRequest, match="more than 20 seconds"):
        ask("")
    assert "secret" not in run.call_args.kwargs["env"].values()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (LOOPS.replace("BODY", ""), "takes more than 0.05 seconds"),
        ("{{ 'x' * 10**11 }}", "rejects this conversation: MemoryError"),
        ("{% for %}", "syntax error"),
        ("{{ raise_exception('No.') }}", "rejects this conversation: No."),
    ],
)
def test_case_bug_019_a_request_s_template_cannot_do_harm(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        ask(source)
    assert caught.value.param == "chat_template"
