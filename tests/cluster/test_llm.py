"""``octavo.LLM``: prompts in, results out, in this process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_text_model import MAX_MODEL_LEN, save_tiny_text_model

import octavo
from octavo.cluster.api.errors import DeadlineMissed
from octavo.cluster.offline import calls as llm_calls
from octavo.cluster.offline.llm import LLM
from octavo.cluster.offline.results import GatheredOutput, RequestOutput
from octavo.worker.errors import ContextLengthExceeded, InvalidRequest

IDS = [504, 3575, 282, 4649, 314]
FOX = "The quick brown fox jumps over the lazy dog. "
FLAGS: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": "16MiB"}


@pytest.fixture(scope="module")
def folder(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_text_model(path, model_dir)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **FLAGS) as llm:
        yield llm


def texts(results: list[RequestOutput]) -> list[list[str]]:
    return [[output.text for output in result.outputs] for result in results]


def num_taken(llm: LLM) -> int:
    """Requests that the engine has ever had."""
    model = llm._open()
    return model.run(model.service._loop.ask(lambda engine: engine.counters.num_prompt_tokens))


# ---- prompts and results ----


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["One", IDS, "Two, three"]
    results = llm.generate(prompts, max_tokens=5, temperature=0, ignore_eos=True)
    assert [result.prompt for result in results] == ["One", None, "Two, three"]
    assert results[1].prompt_token_ids == tuple(IDS)
    assert [len(result.outputs[0].token_ids) for result in results] == [5, 5, 5]
    assert [result.outputs[0].finish_reason for result in results] == ["length"] * 3
    alone = [llm.generate(prompt, max_tokens=5, temperature=0, ignore_eos=True)[0] for prompt in prompts]
    assert texts(results) == texts(alone)


@pytest.mark.parametrize("prompt", ["A text", IDS, tuple(IDS), np.array(IDS)])
def test_a_text_and_a_list_of_token_ids_are_one_prompt_each(llm: LLM, prompt: Any) -> None:
    assert len(llm.generate(prompt, max_tokens=1)) == 1


def test_no_prompts_give_no_results(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_there_may_be_more_prompts_than_in_an_http_request(llm: LLM) -> None:
    results = llm.generate([[index + 100] for index in range(80)], max_tokens=1)
    assert [result.prompt_token_ids for result in results] == [(index + 100,) for index in range(80)]


def test_each_prompt_may_have_fields_of_its_own(llm: LLM) -> None:
    params = [{"max_tokens": 2}, {"max_tokens": 4}]
    results = llm.generate(["One", "Two"], params, max_tokens=9, ignore_eos=True)
    assert [len(result.outputs[0].token_ids) for result in results] == [2, 4]


def test_n_outputs_are_drawn_apart_and_again_the_same(llm: LLM) -> None:
    (first,) = llm.generate("One", n=3, seed=7, max_tokens=6, ignore_eos=True)
    (second,) = llm.generate("One", n=3, seed=7, max_tokens=6, ignore_eos=True)
    assert [output.index for output in first.outputs] == [0, 1, 2]
    assert len({output.token_ids for output in first.outputs}) == 3
    assert first.outputs == second.outputs


def test_a_stop_string_ends_one_output_and_the_others_go_on(llm: LLM) -> None:
    fields: dict[str, Any] = {"n": 2, "seed": 7, "max_tokens": 12, "ignore_eos": True}
    (free,) = llm.generate("One", **fields)
    stop = free.outputs[0].text[8:12]
    assert stop not in free.outputs[1].text
    (stopped,) = llm.generate("One", stop=stop, **fields)
    first, second = stopped.outputs
    assert (first.finish_reason, first.stop_reason) == ("stop", stop)
    assert first.text == free.outputs[0].text[:8]
    assert second == free.outputs[1]


def test_log_probabilities_stand_beside_every_token(llm: LLM) -> None:
    (result,) = llm.generate(IDS, max_tokens=3, temperature=0, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (output,) = result.outputs
    assert output.logprobs is not None
    assert [entry.top_token_ids[0] for entry in output.logprobs] == list(output.token_ids)
    assert [len(entry.top_logprobs) for entry in output.logprobs] == [2, 2, 2]
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(IDS)


def test_an_echo_with_log_probabilities_has_those_of_the_prompt(llm: LLM) -> None:
    (echo,) = llm.generate(IDS, max_tokens=1, echo=True, logprobs=2)
    (asked,) = llm.generate(IDS, max_tokens=1, prompt_logprobs=2)
    assert echo.prompt_logprobs is not None
    assert echo.prompt_logprobs == asked.prompt_logprobs
    (alone,) = llm.generate(IDS, max_tokens=1, echo=True)
    assert alone.prompt_logprobs is None


def test_a_prompt_has_as_many_alternatives_as_were_asked_for_it(llm: LLM) -> None:
    (result,) = llm.generate(IDS, max_tokens=1, echo=True, logprobs=5, prompt_logprobs=0)
    assert result.prompt_logprobs is not None
    assert [each and each.top_logprobs for each in result.prompt_logprobs] == [None, (), (), (), ()]
    assert result.outputs[0].logprobs is not None
    assert len(result.outputs[0].logprobs[0].top_logprobs) == 5


def test_an_echo_begins_with_the_prompt(llm: LLM) -> None:
    (result,) = llm.generate(FOX, echo=True, max_tokens=1)
    assert result.outputs[0].text.startswith(FOX)
    assert len(result.outputs[0].token_ids) == 1


def test_a_later_call_finds_what_an_earlier_one_has_computed(llm: LLM) -> None:
    llm.reset_prefix_cache()
    (cold,) = llm.generate(4 * FOX, max_tokens=4, temperature=0)
    (warm,) = llm.generate(4 * FOX, max_tokens=4, temperature=0)
    assert (cold.num_cached_tokens, warm.num_cached_tokens > 16) == (0, True)
    assert cold.outputs == warm.outputs
    assert llm.reset_prefix_cache() > 0


def test_chats_are_answered_by_messages(llm: LLM) -> None:
    chat = [{"role": "user", "content": "Hello"}]
    one = llm.chat(chat, max_tokens=4, temperature=0)
    two = llm.chat([chat, [*chat, {"role": "assistant", "content": "Hi"}, *chat]], max_tokens=4, temperature=0)
    assert len(one) == 1
    assert [len(result.outputs) for result in two] == [1, 1]
    assert one[0].outputs == two[0].outputs
    message = one[0].outputs[0].message
    assert message is not None
    assert message.content == one[0].outputs[0].text


def test_embeddings_are_unit_vectors_that_say_what_the_input_is(llm: LLM) -> None:
    first, other, again = llm.embed(["One", IDS, "One"])
    assert [np.linalg.norm(result.embedding) for result in (first, other)] == pytest.approx([1, 1])
    assert first.embedding == pytest.approx(again.embedding, abs=1e-5)
    assert other.prompt_token_ids == tuple(IDS)
    (mean,) = llm.embed(IDS, pooling="mean")
    assert not np.allclose(mean.embedding, other.embedding, atol=1e-3)


# ---- what is refused, and what fails ----


@pytest.mark.parametrize(
    ("prompts", "fields", "param"),
    [
        ("One", {"temperature": 5}, "temperature"),
        ("One", {"temperature": float("nan")}, "temperature"),
        ("One", {"max_tokens": 0}, "max_tokens"),
        ("One", {"no_such_field": 1}, "no_such_field"),
        ("One", {"stream": True}, "stream"),
        ("One", {"model": "other"}, "model"),
        ("One", {"logit_bias": {10**9: 1.0}}, "logit_bias"),
        ("", {}, "prompt"),
        ("\ud800", {}, "prompts"),
        (17, {}, "prompts"),
        (["One", "Two"], {"params": [{}]}, "params"),
        (["One", []], {}, "prompt"),
        (["One", [10**9]], {}, "prompt"),
    ],
)
def test_a_field_is_refused_by_name_before_any_work(llm: LLM, prompts: Any, fields: dict[str, Any], param: str) -> None:
    before = num_taken(llm)
    with pytest.raises(InvalidRequest) as refusal:
        llm.generate(prompts, **fields)
    assert refusal.value.param == param
    assert num_taken(llm) == before


def test_of_several_prompts_the_one_at_fault_is_named(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceeded, match=r"^prompts\[1\]: .* 512"):
        llm.generate(["One", [1] * (MAX_MODEL_LEN + 1)])


def test_a_request_that_fails_alone_costs_the_others_nothing(llm: LLM) -> None:
    failed, answered = llm.generate(["One", "Two"], [{"timeout": 1e-9}, {}], max_tokens=2, ignore_eos=True)
    assert isinstance(failed.error, DeadlineMissed)
    assert failed.outputs == ()
    assert answered.error is None
    assert len(answered.outputs[0].token_ids) == 2


# ---- around it ----


def test_ctrl_c_ends_the_requests_and_the_engine_goes_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = llm.generate("One", max_tokens=4, temperature=0)
    main = threading.main_thread().ident
    assert main is not None

    class Interrupting(GatheredOutput):
        def add(self, event: Any) -> None:
            super().add(event)
            signal.pthread_kill(main, signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(llm_calls, "GatheredOutput", Interrupting)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[index + 100] for index in range(8)], max_tokens=400, ignore_eos=True)
    model = llm._open()
    assert model.run(model.service._loop.ask(lambda engine: engine.num_requests)) == 0
    assert llm.generate("One", max_tokens=4, temperature=0) == before


async def test_it_works_where_an_event_loop_runs(llm: LLM) -> None:
    assert len(llm.generate("One", max_tokens=1)) == 1


def test_calls_of_several_threads_run_together(llm: LLM) -> None:
    results: dict[int, list[RequestOutput]] = {}

    def call(index: int) -> None:
        results[index] = llm.generate([100 + index], max_tokens=2, temperature=0)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {index: result[0].prompt_token_ids for index, result in results.items()} == {
        index: (100 + index,) for index in range(4)
    }


def test_a_progress_bar_is_shown_where_it_is_asked_for(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["One", "Two"], max_tokens=1)
    assert capfd.readouterr().err == ""
    llm.generate(["One", "Two"], max_tokens=1, use_tqdm=True)
    shown = capfd.readouterr().err
    assert "2/2" in shown
    assert "tok/s" in shown


def test_two_may_live_in_one_process_and_one_may_end(llm: LLM, folder: Path) -> None:
    expected = llm.generate("One", max_tokens=4, temperature=0)
    other = LLM(folder, **FLAGS)
    assert other.generate("One", max_tokens=4, temperature=0)[0].outputs == expected[0].outputs
    other.close()
    other.close()
    with pytest.raises(RuntimeError, match="closed"):
        other.generate("One")
    assert llm.generate("One", max_tokens=4, temperature=0)[0].outputs == expected[0].outputs


def test_it_is_a_name_of_the_package() -> None:
    assert octavo.LLM is LLM
