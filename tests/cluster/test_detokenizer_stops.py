"""Stop strings: the earliest completed one ends the text, however the text was cut into pieces."""

from __future__ import annotations

from random import Random
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cluster.api.answer.output import Ends, OutputText, OutputToken
from octavo.cluster.api.answer.stop_strings import StopStrings
from octavo.cluster.api.service import TokenDelta
from octavo.cluster.api.text.processor import TextProcessor
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
        output = OutputText(text.detokenizer(()), Ends(tuple(stops)))
        sent = feed(output, token_ids, cuts_, FinishReason.LENGTH)
        results.append((sent, output.finish_reason, output.num_tokens))
    assert all(result == results[0] for result in results)
    assert results[0][0] == expected(answer, stops)[0]


ALPHABET = [
    *"aab b\n",
    "é",
    "e\u0301",
    "안녕",
    "你好",
    "한",
    "👩",
    "👩\u200d👩\u200d👧",
    "🇰🇷",
    "🏳️\u200d🌈",
    "שלום",
    "€",
]


def random_case(random: Random, text: TextProcessor) -> tuple[list[int], list[str]]:
    """Tokens, of a text or of none, and stop strings that are often in their text."""
    token_ids = text._backend.encode("".join(random.choices(ALPHABET, k=random.randrange(25)))).ids
    for _ in range(random.choice([0, 0, 1, 5])):  # half characters, special tokens, rows without a token
        token_ids.insert(random.randrange(len(token_ids) + 1), random.choice([2, 49_200, random.randrange(49_152)]))
    whole, stops = text.decode(token_ids), []
    for _ in range(random.randrange(4)):
        start = random.randrange(len(whole) + 1)
        stops.append(whole[start : start + random.randint(1, 8)] or random.choice(ALPHABET))
    return token_ids, stops


def test_case_bug_025_five_thousand_outputs_are_the_reference_cut_at_the_first_stop(text: TextProcessor) -> None:
    """For any pieces in which the tokens come. Each counted token is told of once, inside of the text."""
    random = Random(6)
    for _ in range(5000):
        token_ids, stops = random_case(random, text)
        include = random.random() < 0.3
        sent, stop = expected(text.decode(token_ids), stops)
        output = OutputText(text.detokenizer(()), Ends(tuple(stops), include=include), keeps_tokens=True)
        sizes = [random.choice([1, 1, 1, 2, 5]) for _ in token_ids]
        assert feed(output, token_ids, sizes, FinishReason.LENGTH) == sent + (stop or "") * include
        assert output.stop_reason == stop
        told = output.take_tokens()
        assert [token.token_id for token in told] == token_ids[: output.num_tokens]
        offsets = [token.offset for token in told]
        assert offsets == sorted(offsets)
        assert max(offsets, default=0) <= len(sent + (stop or "") * include)


@pytest.mark.parametrize("sizes", [[1] * 99, [3] * 33, [99]])
def test_a_token_is_told_of_when_its_text_is(text: TextProcessor, sizes: list[int]) -> None:
    token_ids = text._backend.encode("one 👩 two stop").ids
    output = OutputText(text.detokenizer(()), Ends((" two stopping",)), keeps_tokens=True)
    sent = ""
    told: list[OutputToken] = []
    for part in cut(token_ids, sizes):
        if not part:
            break
        sent += output.push(TokenDelta(tuple(part)))
        told += output.take_tokens()
        assert text.decode([token.token_id for token in told]) == sent
        assert all(token.offset < len(sent) for token in told)
    assert sent == "one 👩"
    assert output.push(TokenDelta((), FinishReason.LENGTH)) == " two stop"
    assert text.decode([token.token_id for token in output.take_tokens()]) == " two stop"


@pytest.mark.parametrize(("skip", "include"), [(True, True), (False, True), (False, False)])
def test_the_text_of_the_models_own_end_is_no_output(text: TextProcessor, skip: bool, include: bool) -> None:
    ends = Ends(token_ids=(2,), include=include, eos_token_ids=(2,))
    output = OutputText(text.detokenizer((), skip_special_tokens=skip), ends)
    assert output.push(TokenDelta((*text._backend.encode("All").ids, 2), FinishReason.STOP)) == "All"
    assert output.stop_reason is None


@pytest.mark.parametrize(("include", "sent"), [(True, "All of"), (False, "All")])
def test_the_text_of_a_stop_token_that_was_named_stays_if_wanted(text: TextProcessor, include: bool, sent: str) -> None:
    token_ids = text._backend.encode("All of").ids
    output = OutputText(text.detokenizer(()), Ends(token_ids=(2, token_ids[-1]), include=include, eos_token_ids=(2,)))
    assert output.push(TokenDelta(tuple(token_ids), FinishReason.STOP)) == sent
    assert output.stop_reason == token_ids[-1]


def output_of(text: TextProcessor, answer: str, *stops: str, min_tokens: int = 0) -> tuple[str, OutputText]:
    token_ids = text._backend.encode(answer).ids
    output = OutputText(text.detokenizer(()), Ends(stops, min_tokens=min_tokens))
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
    output = OutputText(text.detokenizer(()), Ends(("<|im_end|>",), stop_ids, eos_token_ids=(2,)))
    token_ids = text._backend.encode("All of it.").ids
    sent = output.push(TokenDelta((*token_ids, stop_ids[-1]), FinishReason.STOP))
    assert sent == "All of it."
    assert output.num_tokens == len(token_ids) + 1


def test_what_waited_for_a_stop_string_is_sent_at_the_end(text: TextProcessor) -> None:
    sent, output = output_of(text, "wait for the en", "the end")
    assert (sent, output.finish_reason) == ("wait for the en", FinishReason.LENGTH)
