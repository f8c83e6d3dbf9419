"""A rank that keeps tokens: what a sequence reads through its block table shows whether it is its own.

For every slot of every block it keeps what a model would have written there: a digest of the whole prefix, made from
the digest *that it reads* for the position before and the token. So a block that is shared wrongly, reused too early,
not copied, never written or written over changes what is read, and with it the next token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.worker.messages import TokenLogprobs
from octavo.worker.sampling_row import Candidate, SamplingRow, StepResult
from octavo.worker.scheduler import Scheduler, SchedulerLimits
from octavo.worker.step_plan import StepPlan, pack_plan, unpack_plan

VOCABULARY = 5


def digests(salt: str | None, token_ids: Iterable[int]) -> Iterator[int]:
    """What a model writes for each token: it depends on all tokens before, and (here) on the salt."""
    digest = 0 if salt is None else 1 + len(salt)
    for token in token_ids:
        digest = hash((digest, token))
        yield digest


def draw(digest: int, row: SamplingRow) -> int:
    """The next token: a function of the visible prefix and of what the row says, as sampling is."""
    allowed = [token for token in range(VOCABULARY) if token not in row.banned_token_ids]
    return allowed[hash((digest, row.seed, row.branch, row.position)) % len(allowed)]


def likeliest(digest: int, row: SamplingRow) -> tuple[Candidate, ...]:
    """For a beam search: tokens with log-probabilities that depend on the visible prefix alone."""
    allowed = [token for token in range(VOCABULARY) if token not in row.banned_token_ids]
    rated = [(token, -0.1 - (hash((digest, token)) % 100_003) / 50_000) for token in allowed]
    return tuple(sorted(rated, key=lambda candidate: (-candidate[1], candidate[0]))[: row.num_candidates])


def score(digest: int, next_token: int) -> TokenLogprobs:
    """How likely a token is after what a model has written."""
    return TokenLogprobs(-float(digest % 10_007), rank=1 + next_token)


def hidden(digest: int) -> float:
    """A last hidden state of one number. Some dozens are added up exactly."""
    return float(digest % 10_007)


@dataclass
class _Seen:
    """What the leader knew of a sequence when it launched a step."""

    slot: int
    salt: str | None
    token_ids: list[int]
    end: int
    """Tokens computed after the step. One more than are known if the last is sampled by the step before."""
    pending_row: int


@dataclass
class _Launched:
    plan: StepPlan
    rows: list[SamplingRow]
    seen: list[_Seen]
    future: Future[StepResult]


class _LazyFuture(Future[StepResult]):
    """Its step is carried out when somebody waits for it: as late as can be."""

    def __init__(self, rank: FakeRank) -> None:
        super().__init__()
        self._rank = rank

    def result(self, timeout: float | None = None) -> StepResult:
        while not self.done():
            self._rank.run_next()
        return super().result(timeout)


class FakeRank:
    """Carries out plans as a rank does: it knows nothing but what the plans say, and keeps its block tables.

    ``scheduler`` is looked at only to know what should be read. ``eager`` runs a step when it is launched.
    """

    def __init__(self, limits: SchedulerLimits, *, eager: bool = True) -> None:
        self.scheduler: Scheduler
        self.eager = eager
        self.num_shared_within_a_step = 0
        self.num_launched_ahead = 0
        self._size = limits.block_size
        self._memory: list[list[int | None]] = [[None] * limits.block_size for _ in range(limits.num_blocks)]
        self._tables: list[dict[int, int]] = [{} for _ in range(limits.max_num_seqs)]
        self._salts: list[str | None] = [None] * limits.max_num_seqs
        self._launched: list[_Launched] = []
        self._sampled: dict[int, list[int]] = {}
        self._last_step = 0

    def launch(self, plan: StepPlan, rows: list[SamplingRow]) -> Future[StepResult]:
        seen = [self._seen(slot) for slot in plan.slots.tolist()]
        future: Future[StepResult] = _LazyFuture(self)
        self.num_launched_ahead += bool(self._launched)
        self._launched.append(_Launched(unpack_plan(pack_plan(plan)), list(rows), seen, future))
        assert len(self._launched) <= 2
        if self.eager:
            self.run_next()
        return future

    def _seen(self, slot: int) -> _Seen:
        sequence = next(sequence for sequence in self.scheduler.running if sequence.slot == slot)
        end = sequence.num_computed_tokens
        return _Seen(slot, sequence.request.cache_salt, sequence.token_ids.tolist(), end, 0)

    def run_next(self) -> None:
        launched = self._launched.pop(0)
        launched.future.set_result(self._execute(launched.plan, launched.rows, launched.seen))

    def _execute(self, plan: StepPlan, rows: list[SamplingRow], seen: list[_Seen]) -> StepResult:
        assert plan.step == self._last_step + 1
        self._last_step = plan.step
        tokens = self._known_tokens(plan)
        self._update_tables(plan)
        self._copy(plan)
        for known in seen:
            self._salts[known.slot] = known.salt
        last_digests = self._write(plan, tokens)
        self._check_what_is_read(plan, seen, tokens)
        ends = [last_digests[index] for index in plan.logit_indices.tolist()]
        candidates = {i: likeliest(ends[i], row) for i, row in enumerate(rows) if row.num_candidates}
        drawn = [
            candidates[i][0][0] if row.num_candidates else draw(digest, row)
            for i, (digest, row) in enumerate(zip(ends, rows, strict=True))
        ]
        self._sampled = {plan.step: drawn} if plan.share_sampled else {}
        scores = tuple(_scores(last_digests, tokens, *run) for run in plan.scored.tolist())
        sums = tuple(_sum(last_digests[first : first + count]) for first, count in plan.pooled.tolist())
        return StepResult(list(drawn), candidates, prompt_logprobs=scores, hidden_sums=sums)

    def _known_tokens(self, plan: StepPlan) -> list[int]:
        """The step's tokens; what was not known when it was planned is what the step before it sampled."""
        tokens = plan.token_ids.tolist()
        if min(tokens) >= 0:
            return tokens
        assert plan.tokens_from_step is not None
        sampled = self._sampled[plan.tokens_from_step]
        return [token if token >= 0 else sampled[-1 - token] for token in tokens]

    def _update_tables(self, plan: StepPlan) -> None:
        blocks = iter(plan.table_blocks.tolist())
        for slot, first, count in plan.table_updates.tolist():
            for logical in range(first, first + count):
                self._tables[slot][logical] = next(blocks)
        assert next(blocks, None) is None

    def _copy(self, plan: StepPlan) -> None:
        copies = plan.copies.tolist()
        sources, destinations = {source for source, _ in copies}, [destination for _, destination in copies]
        assert len(set(destinations)) == len(destinations)
        assert not sources & set(destinations)
        contents = [self._memory[source][:] for source, _ in copies]
        for destination, content in zip(destinations, contents, strict=True):
            self._memory[destination] = content

    def _write(self, plan: StepPlan, step_tokens: list[int]) -> list[int]:
        """The digest of each of the step's tokens, in the plan's order."""
        tokens, written, result = iter(step_tokens), set(), []
        for slot, start, count in zip(
            plan.slots.tolist(), plan.num_computed_tokens.tolist(), plan.num_new_tokens.tolist(), strict=True
        ):
            self.num_shared_within_a_step += start > 0 and self._place(slot, start - 1) in written
            for position in range(start, start + count):
                place = self._place(slot, position)
                assert place not in written, "two tokens of a step are written to one place"
                written.add(place)
                before = self._root(slot) if position == 0 else self._read(slot, position - 1)
                self._memory[place[0]][place[1]] = digest = hash((before, next(tokens)))
                result.append(digest)
        return result

    def _check_what_is_read(self, plan: StepPlan, seen: list[_Seen], step_tokens: list[int]) -> None:
        """After all writes of the step: every position of every sequence reads back that sequence's own K and V."""
        begin = 0
        for known, count in zip(seen, plan.num_new_tokens.tolist(), strict=True):
            begin += count
            tokens = known.token_ids[: known.end]
            if len(tokens) < known.end:
                tokens.append(step_tokens[begin - 1])
            assert len(tokens) == known.end
            read = [self._read(known.slot, position) for position in range(known.end)]
            assert read == list(digests(known.salt, tokens))

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        return self._tables[slot][position // self._size], position % self._size

    def _read(self, slot: int, position: int) -> int:
        block, offset = self._place(slot, position)
        digest = self._memory[block][offset]
        assert digest is not None, "read before anything was written"
        return digest

    def _root(self, slot: int) -> int:
        salt = self._salts[slot]
        return 0 if salt is None else 1 + len(salt)


def _scores(
    digests: list[int], tokens: list[int], first: int, count: int, k: int, last_target: int
) -> tuple[TokenLogprobs, ...]:
    targets = [*tokens[first + 1 : first + count], last_target]
    return tuple(map(score, digests[first : first + count], targets))


def _sum(digests: list[int]) -> NDArray[np.float32]:
    return np.array([sum(map(hidden, digests))], np.float32)
