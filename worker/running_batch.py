"""RunningBatch: the sequences that run, each in a slot of the persistent batch, in the order of their admission."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from .sequence import Sequence, SequenceStatus


class RunningBatch:
    """Up to ``max_num_seqs`` sequences. Ranks keep one block table for each slot."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._sequences: dict[int, Sequence] = {}
        self._beams: Counter[str] = Counter()
        """How many beams run, by request id."""
        self._unforked: dict[int, Sequence] = {}
        """Those with branches still to be forked."""
        self._readers: dict[int, Sequence] = {}
        """Those that came with something of their prompt to be scored or pooled."""
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    @property
    def sequences(self) -> Collection[Sequence]:
        return self._sequences.values()

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def num_free_slots(self) -> int:
        """Sequences that there is room for."""
        return len(self._free_slots)

    @property
    def num_beams(self) -> int:
        """Beams of searches, whose next step depends on the tokens of the one before."""
        return self._beams.total()

    @property
    def unforked(self) -> Collection[Sequence]:
        """Sequences with branches that begin when their prompt is computed."""
        return self._unforked.values()

    @property
    def reads_prompts(self) -> bool:
        """More than what is drawn may be wanted of a prompt here."""
        return bool(self._readers)

    def has_beams_of(self, request_id: str) -> bool:
        return request_id in self._beams

    def enter(self, sequence: Sequence) -> None:
        """Give it a slot; there must be one."""
        sequence.slot = self._free_slots.pop()
        sequence.status = SequenceStatus.RUNNING
        self._sequences[id(sequence)] = sequence
        if sequence.is_beam:
            self._beams[sequence.request.request_id] += 1
        if sequence.unforked_branches:
            self._unforked[id(sequence)] = sequence
        if sequence.num_read_tokens < sequence.num_tokens_to_read:
            self._readers[id(sequence)] = sequence

    def leave(self, sequence: Sequence) -> None:
        """Take its slot back. Its status is the caller's to change."""
        del self._sequences[id(sequence)]
        if sequence.is_beam:
            self._beams[sequence.request.request_id] -= 1
            self._beams += Counter()  # forgets what is at 0
        self._unforked.pop(id(sequence), None)
        self._readers.pop(id(sequence), None)
        if sequence.slot is not None:
            self._free_slots.append(sequence.slot)
            sequence.slot = None

    def take_unforked(self, sequence: Sequence) -> list[int]:
        """The branches of ``sequence`` that are to be forked now; it has none any more."""
        del self._unforked[id(sequence)]
        branches, sequence.unforked_branches = sequence.unforked_branches, []
        return branches

    def check(self) -> None:
        """Prove that each slot is free or held once, and that everybody here runs. Raises RuntimeError."""
        slots = self._free_slots + [s.slot for s in self._sequences.values() if s.slot is not None]
        if sorted(slots) != list(range(self._max_num_seqs)):
            raise RuntimeError("the slots of the persistent batch are not each free or held by one sequence")
        if any(sequence.status is not SequenceStatus.RUNNING for sequence in self._sequences.values()):
            raise RuntimeError("a sequence is in the batch that does not run")
