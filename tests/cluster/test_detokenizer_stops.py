"""Stop strings: the earliest completed one ends the text, however the text was cut into pieces."""

from __future__ import annotations

from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cluster.api.detokenizer import StopStrings
from octavo.cluster.api.output import OutputText
from octavo.cluster.api.service import TokenDelta
from octavo.cluster.api.text import TextProcessor
from octavo.worker.messages import FinishReason

# Few letters, so that stop strings are found, overlap and nearly match all the time.
letters = st.text("ab€", max_size=40)
stop_lists = st.lists(st.text("ab€", min_size=1, max_size=5), max_size=4)
cuts = st.lists(st.integers(1, 4), max_size=40)
T = TypeVar("T", str, list[int])


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By definition: the first end of any stop string, and of those that end there the longest."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(text: T, sizes: list[int]) -> list[T]:
    """Text, or token ids, in pieces of the given sizes and the rest."""
    parts: list[T] = []
    for size in sizes:
        parts.append(text[:size])
        text = text[size:]
    parts.append(text)
    return parts


@given(letters, stop_lists, cuts)
def test_text_and_stop_do_not_depend_on_the_cuts(text: str, stops: list[str], sizes: list[int]) -> None:
    watcher, sent = StopStrings(stops), ""
    for part in cut(text, sizes):
        sent += watcher.push(part)
        if watcher.found is not None:
            break
    assert (sent + watcher.flush(), watcher.found) == expected(text, stops)


@given(letters, stop_lists)
def test_only_the_beginning_of_a_stop_string_waits(text: str, stops: list[str]) -> None:
    watcher, sent = StopStrings(stops), ""
    for position, character in enumerate(text, start=1):
        sent += watcher.push(character)
        if watcher.found is not None:
            return
        waiting = text[len(sent) : position]
        beginnings = {stop[:length] for stop in stops for length in range(len(stop))} | {""}
        assert waiting == max((b for b in beginnings if text[:position].endswith(b)), key=len)


def feed(output: OutputText, token_ids: list[int], sizes: list[int], reason: FinishReason) -> str:
    sent = ""
    parts = cut(token_ids, sizes)
    for index, part in enumerate(parts):
        sent += output.push(TokenDelta(tuple(part), reason if index == len(parts) - 1 else None))
        if output.finish_reason is not None:
            break
    return sent


@given(
    answer=st.text("abc ü👩안\n", max_size=40),
    stops=st.lists(st.text("abc ü👩안\n", min_size=1, max_size=6), max_size=3),
    sizes=cuts,
    other_sizes=cuts,
)
def test_streamed_and_whole_output_are_equal(
    text: TextProcessor, answer: str, stops: list[str], sizes: list[int], other_sizes: list[int]
) -> None:
    """Text, reason and number of tokens, for any way in which the engine hands out the tokens."""
    token_ids = text._backend.encode(answer).ids
    results = []
    for cuts_ in (sizes, other_sizes, [len(token_ids)], [1] * len(token_ids)):
        output = OutputText(text.detokenizer(()), tuple(stops))
        sent = feed(output, token_ids, cuts_, FinishReason.LENGTH)
        results.append((sent, output.finish_reason, output.num_tokens))
    assert all(result == results[0] for result in results)
    assert results[0][0] == expected(answer, stops)[0]


def output_of(text: TextProcessor, answer: str, *stops: str, min_tokens: int = 0) -> tuple[str, OutputText]:
    token_ids = text._backend.encode(answer).ids
    output = OutputText(text.detokenizer(()), stops, min_tokens=min_tokens)
    return feed(output, token_ids, [1] * len(token_ids), FinishReason.LENGTH), output


@pytest.mark.parametrize(
    ("stops", "sent"),
    [
        pytest.param(["ick brown f"], "The qu", id="begins in a token, spans several"),
        pytest.param(["The q"], "", id="at the very start"),
        pytest.param(["bro", "brown"], "The quick ", id="one is the beginning of the other"),
        pytest.param(["fox", "quick"], "The ", id="the later listed occurs earlier"),
        pytest.param(["🦊"], "The quick brown fox ", id="an emoji"),
        pytest.param(["quirk", "browse", "zzz"], "The quick brown fox 🦊 jumps", id="near misses"),
    ],
)
def test_case_bug_027_stop_strings_over_tokens(text: TextProcessor, stops: list[str], sent: str) -> None:
    assert output_of(text, "The quick brown fox 🦊 jumps", *stops)[0] == sent


def test_tokens_count_up_to_the_one_that_completed_the_stop_string(text: TextProcessor) -> None:
    num_tokens = len(text._backend.encode("one two three").ids)
    sent, output = output_of(text, "one two three four five six", " three")
    assert (sent, output.num_tokens, output.finish_reason) == ("one two", num_tokens, FinishReason.STOP)


def test_stop_strings_do_not_count_in_the_first_min_tokens(text: TextProcessor) -> None:
    sent, _ = output_of(text, "stop and go and stop again", "stop", min_tokens=1)
    assert sent == "stop and go and "


@pytest.mark.parametrize("stop_ids", [(2,), (2, 99)])
def test_case_bug_029_the_text_of_a_stop_token_is_no_output(text: TextProcessor, stop_ids: tuple[int, ...]) -> None:
    output = OutputText(text.detokenizer(()), ("<|im_end|>",), stop_token_ids=stop_ids)
    token_ids = text._backend.encode("All of it.").ids
    sent = output.push(TokenDelta((*token_ids, stop_ids[-1]), FinishReason.STOP))
    assert sent == "All of it."
    assert output.num_tokens == len(token_ids) + 1


def test_what_waited_for_a_stop_string_is_sent_at_the_end(text: TextProcessor) -> None:
    sent, output = output_of(text, "wait for the en", "the end")
    assert (sent, output.finish_reason) == ("wait for the en", FinishReason.LENGTH)
