"""Who is taken for the cause of a group's death, and who was only beside it."""

from __future__ import annotations

import pytest

from octavo.cluster.suspicion import MOST_IN_A_ROW, MOST_IN_ALL, PROOF_TOKENS, SUSPECT_AFTER, Suspicion, Trials


def test_a_request_that_three_groups_die_of_is_proved() -> None:
    suspicion = Suspicion()
    for number in range(1, MOST_IN_A_ROW + 1):
        suspicion.group_lost(50)
        assert suspicion.is_suspect == (number >= SUSPECT_AFTER)
        assert suspicion.is_proved == (number == MOST_IN_A_ROW)


@pytest.mark.parametrize("progress", [0, PROOF_TOKENS - 1, PROOF_TOKENS])
def test_who_gets_on_behind_the_fatal_step_is_disproved(progress: int) -> None:
    suspicion = Suspicion()
    suspicion.group_lost(20)
    suspicion.group_lost(20)
    has_got_on = progress == PROOF_TOKENS
    assert suspicion.is_disproved(20 + progress) == has_got_on
    suspicion.group_lost(20 + progress)
    assert suspicion.is_proved == (not has_got_on)
    assert suspicion.is_suspect == (not has_got_on)


def test_one_that_kills_slowly_is_found_in_the_end() -> None:
    suspicion = Suspicion()
    for number in range(1, MOST_IN_ALL + 1):
        assert not suspicion.is_proved
        suspicion.group_lost(100 * number)
        assert not suspicion.is_suspect
    assert suspicion.is_proved


def test_a_group_has_one_suspect_until_it_leaves() -> None:
    trials = Trials()
    trials.begin("a", 1)
    trials.begin("b", 2)
    assert trials.groups == (1, 2)
    trials.end("a")
    trials.end("a")
    trials.end("never was one")
    assert trials.groups == (2,)
