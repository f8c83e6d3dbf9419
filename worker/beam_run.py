"""BeamRun: a beam search under way: its beams as sequences of the scheduler, forked and ended as the search chooses."""

from __future__ import annotations

from .beam_search import Beam, BeamSearch, Output
from .messages import FinishReason, SamplingParams
from .sampling_row import Candidate
from .scheduler import Scheduler
from .sequence import Sequence


class BeamRun:
    """``root`` is the sequence that computes the prompt."""

    def __init__(self, sampling: SamplingParams, scheduler: Scheduler, root: Sequence) -> None:
        self.beams = [root]
        """In the order of the last choice."""
        self._search = BeamSearch(sampling)
        self._scheduler = scheduler
        self._num_beams_made = 1
        self._given: dict[int, tuple[Candidate, ...]] = {}
        """What the beams gave that were computed since the last choice, by their number."""

    @property
    def num_candidates(self) -> int:
        """Likeliest tokens that are wanted of each beam."""
        return self._search.num_candidates

    def take(self, beam: Sequence, candidates: tuple[Candidate, ...]) -> bool:
        """What ``beam`` gave. When all have given theirs, the search goes on with those that it chooses.

        True when it is over.
        """
        self._given[beam.branch] = candidates
        if len(self._given) < len(self.beams):
            return False
        given = [self._given[each.branch] for each in self.beams]
        self._given.clear()
        chosen = self._search.advance(given)
        if chosen:
            self._go_on(chosen)
        return not chosen

    def _go_on(self, chosen: tuple[Beam, ...]) -> None:
        """Fork beams that have several successors, end those that have none."""
        num_left = [0] * len(self.beams)
        for beam in chosen:
            num_left[beam.parent] += 1
        for parent, count in zip(self.beams, num_left, strict=True):
            if count == 0:  # first, so that its slot and blocks are there for the others
                self._scheduler.finish(parent, FinishReason.ABORT)
        successors = []
        for beam in chosen:
            num_left[beam.parent] -= 1
            is_last = num_left[beam.parent] == 0  # which goes on as its parent
            parent = self.beams[beam.parent]
            successors.append(parent if is_last else self._fork(parent))
        for sequence, beam in zip(successors, chosen, strict=True):
            sequence.append(beam.token_id)
        self.beams = successors

    def _fork(self, parent: Sequence) -> Sequence:
        self._num_beams_made += 1
        return self._scheduler.fork(parent, self._num_beams_made - 1)

    def outputs(self, count: int) -> tuple[Output, ...]:
        """The best ``count`` outputs so far, or as many as there are."""
        return self._search.outputs(count)
