"""A chat template: a Jinja program, run in a sandbox with a bound on its time and on what it writes.

The dialect is transformers' (``apply_chat_template``): blocks leave no white space, ``break`` and ``continue``,
``tojson`` that escapes nothing, ``raise_exception``, ``strftime_now``, and ``{% generation %}``, which marks text
for training and does nothing here.

Every pass of a loop and every call of a macro is counted, whether it writes or not, so no template runs for ever. What
one expression can do, such as ``"x" * 10**10``, is not bounded here: a template that is not the operator's runs in a
process of its own (``template_process.py``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_BUDGET = "\0budget"
"""The variable that carries a rendering's budget; no template can name it."""
_PASSES_PER_LOOK = 256
"""Passes of loops between two looks at the clock."""


@dataclass(frozen=True, slots=True)
class RenderLimits:
    cpu_s: float = 10.0
    """Time of the processor, so that a busy machine does not count."""
    max_chars: int = 2**27


OPERATORS_LIMITS = RenderLimits()
"""Of the template that the server was started with."""


class RenderLimitExceeded(Exception):
    """The template ran for too long, or wrote too much."""


class _Budget:
    """What one rendering may still do. Lives in one thread."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._deadline = time.thread_time() + limits.cpu_s
        self._passes = _PASSES_PER_LOOK
        self._num_chars = 0

    def count_pass(self) -> None:
        self._passes -= 1
        if self._passes <= 0:
            self._passes = _PASSES_PER_LOOK
            self.check_time()

    def check_time(self) -> None:
        if time.thread_time() > self._deadline:
            raise RenderLimitExceeded(f"it takes more than {self._limits.cpu_s:g} seconds")

    def count_chars(self, text: str) -> None:
        self._num_chars += len(text)
        if self._num_chars > self._limits.max_chars:
            raise RenderLimitExceeded(f"it writes more than {self._limits.max_chars} characters")


class _GenerationTag(Extension):
    tags = {"generation"}  # noqa: RUF012  # jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class _Environment(ImmutableSandboxedEnvironment):
    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    @staticmethod
    def count_pass(context: Context) -> bool:
        """Called by the nodes that ``_count_passes`` puts in; a template cannot change what is in ``parent``."""
        context.parent[_BUDGET].count_pass()
        return True


class ChatTemplate:
    """One compiled template. Any number of threads may render it at once.

    Raises jinja2.TemplateSyntaxError.
    """

    def __init__(self, source: str) -> None:
        environment = _Environment()
        tree = environment.parse(source)
        self.source = source
        self.variables = frozenset(find_undeclared_variables(tree) - set(environment.globals))
        """What the template reads of what it is given."""
        _count_passes(tree)
        self._template = Template.from_code(environment, environment.compile(tree), environment.make_globals(None))

    def render(self, variables: Mapping[str, Any], limits: RenderLimits) -> str:
        """Raises RenderLimitExceeded, and whatever the template raises."""
        budget = _Budget(limits)
        pieces: list[str] = []
        for piece in self._generate(variables, budget):
            budget.count_chars(piece)
            pieces.append(piece)
        budget.check_time()
        return "".join(pieces)

    def _generate(self, variables: Mapping[str, Any], budget: _Budget) -> Iterator[str]:
        return self._template.generate({**variables, _BUDGET: budget})


def _count_passes(tree: nodes.Template) -> None:
    """Begin the body of every loop, macro and call block, and a loop's condition, with ``_Environment.count_pass``."""
    loop: Any
    for loop in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        loop.body.insert(0, nodes.ExprStmt(_counting_call()).set_lineno(loop.lineno))
        if isinstance(loop, nodes.For) and loop.test is not None:
            loop.test = nodes.And(_counting_call(), loop.test).set_lineno(loop.lineno)


def _counting_call() -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute("count_pass"), [nodes.ContextReference()], [], None, None)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
