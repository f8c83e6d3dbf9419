"""The differential test: requests come, are served and aborted at random, and each gives what it gives alone.

A *round* is one engine with a tiny pool, one tree of prompts and some hundred requests, all from one seed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby
from random import Random

from judge import Judge, Judgement, Verdict
from lab import BLOCK_SIZE, Delivered, Lab, Session, Setup
from random_requests import RandomRequests, Text

from octavo.worker.messages import BlocksRemoved, FinishReason, Request
from octavo.worker.routing_hash import HASH_BYTES

MOST_EXCUSED = 0.02
"""Share of the outputs that may differ at a near-tie."""

REACHED = {
    "preemptions": 10,
    "recomputed tokens": 100,
    "evictions": 100,
    "forks": 50,
    "copied blocks": 30,
    "cached prompt tokens": 2000,
    "whole prompts cached": 10,
    "prefix waits": 5,
    "prompt chunks": 100,
    "steps planned ahead": 50,
    "beam searches": 10,
    "abort": 10,
    "stop": 20,
    "continuations": 2,
    "resets": 1,
    "run alone": 20,
}
"""What 300 requests in four rounds reach at least: what was not reached was not tested."""


def not_reached(totals: Counter[str]) -> dict[str, int]:
    """What happened too seldom, and how often."""
    return {name: totals[name] for name, least in REACHED.items() if totals[name] < least}


def setup_of(seed: int, rng: Random) -> Setup:
    """Four seeds in a row have planning ahead and beam searches in all combinations."""
    return Setup(
        num_blocks=rng.choice([32, 40, 48]),
        max_num_seqs=rng.choice([6, 8, 12]),
        max_num_batched_tokens=rng.choice([24, 48, 96]),
        async_scheduling=seed % 2 == 0,
        scheduling_policy=rng.choice(["priority", "priority", "fcfs", "shortest", "fair"]),
    )


@dataclass
class Round:
    lab: Lab
    text: Text
    seed: int
    num_requests: int
    totals: Counter[str] = field(default_factory=Counter)
    requests: list[Request] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    excused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)
        self.setup = setup_of(self.seed, self.rng)
        self.source = RandomRequests(self.rng, self.text, self.lab, beams=self.seed // 2 % 2 == 1)

    # ---- serving ----

    def serve(self) -> list[Delivered]:
        """Everything that was delivered. Raises what the engine raises, AssertionError for a broken promise."""
        with self.lab.session(self.setup) as session:
            while len(self.requests) < self.num_requests or session.engine.has_work:
                self._arrive(session)
                self._interrupt(session)
                assert session.engine.step() or not session.engine.has_work, "work waits, and nothing was computed"
                session.engine.check()
                self._note_events(session)
            session.check_idle()
        self._count(session)
        return list(session.delivered.values())

    def _arrive(self, session: Session) -> None:
        num_under_way = session.engine.num_requests
        if num_under_way < 2 * self.setup.max_num_seqs and self.rng.random() < 0.5:
            burst = self.rng.choice([1, 1, 2, 3, 8])
            for _ in range(min(burst, self.num_requests - len(self.requests))):
                self.requests.append(self._next_request(session))
                session.submit(self.requests[-1])

    def _next_request(self, session: Session) -> Request:
        if self.requests and self.rng.random() < 0.06:
            before = self.rng.choice(self.requests)
            known = [session.delivered[before.request_id, branch.index] for branch in before.branches]
            if before.sampling.beam_width is None and all(each.reason is not None for each in known):
                self.totals["continuations"] += 1
                return self.source.goes_on(known)
        return self.source.next()

    def _interrupt(self, session: Session) -> None:
        dice = self.rng.random()
        if dice < 0.004:
            session.engine.reset_prefix_cache()
            self.totals["resets"] += 1
        elif dice < 0.05 and self.requests:
            self._abort(session, self.rng.choice(self.requests[-20:]))
        elif dice < 0.06 and self.requests:
            request = self.requests[-1]
            if session.delivered[request.request_id, request.branches[0].index].reason is None:
                session.engine.submit(request)  # a second time: changes nothing

    def _abort(self, session: Session, request: Request) -> None:
        branch = self.rng.choice(request.branches).index if self.rng.random() < 0.5 else None
        session.engine.abort(request.request_id, branch=branch)
        session.engine.check()

    def _note_events(self, session: Session) -> None:
        events = session.engine.scheduler.drain_events()
        self.totals["evictions"] += sum(
            len(event.hashes) // HASH_BYTES for event in events if isinstance(event, BlocksRemoved)
        )

    def _count(self, session: Session) -> None:
        scheduler, engine = session.engine.scheduler.counters, session.engine.counters
        self.totals += Counter(
            {
                "requests": len(self.requests),
                "steps": engine.num_steps,
                "preemptions": scheduler.num_preemptions,
                "recomputed tokens": scheduler.num_recomputed_tokens,
                "forks": scheduler.num_forks,
                "copied blocks": scheduler.num_copied_blocks,
                "cached prompt tokens": scheduler.num_cached_prompt_tokens,
                "prefix waits": scheduler.num_prefix_waits,
                "steps planned ahead": session.executor.num_planned_ahead,
                "prompt chunks": session.executor.num_prompt_chunks,
                "beam searches": sum(request.sampling.beam_width is not None for request in self.requests),
                "whole prompts cached": sum(map(_was_cached_whole, session.delivered.values())),
                "outputs": len(session.delivered),
                "output tokens": sum(len(each.token_ids) for each in session.delivered.values()),
            }
        )
        self.totals += Counter({reason.value: number for reason, number in engine.finished.items()})

    # ---- judging ----

    def judge(self, judge: Judge, delivered: list[Delivered], *, alone_every: int) -> None:
        """Every output that was drawn is followed token by token; one of ``alone_every`` requests is also run alone.

        Beam searches are all compared with a run alone.
        """
        by_prompt = sorted(delivered, key=lambda each: each.request.prompt_token_ids)
        for prompt, group in groupby(by_prompt, key=lambda each: each.request.prompt_token_ids):
            outputs = list(group)
            drawn = [each for each in outputs if each.request.sampling.beam_width is None]
            searched = [each for each in outputs if each.request.sampling.beam_width is not None]
            for each, judgement in zip(drawn, list(judge.follow(prompt, drawn)), strict=True):
                if judgement.verdict is not Verdict.EQUAL or int(each.request.request_id) % alone_every == 0:
                    judgement = _worse(judgement, judge.compare_with_alone(each))
                self._note(each, judgement)
            for each in searched:
                aborted = each.reason is FinishReason.ABORT and not each.token_ids
                self._note(each, judge.compare_with_alone(each) if not aborted else Judgement(Verdict.EQUAL))

    def _note(self, delivered: Delivered, judgement: Judgement) -> None:
        self.totals[judgement.verdict.value] += 1
        cached, prompt = delivered.num_cached_tokens or 0, len(delivered.request.prompt_token_ids)
        if judgement.verdict is Verdict.WRONG:
            self._complain(delivered, judgement.why)
        elif judgement.verdict is Verdict.NEAR_TIE:
            self.excused.append(f"{self._name(delivered)}: {judgement.why}")
        if not _is_plausible(cached, prompt, delivered):
            self._complain(delivered, f"{cached} of {prompt} prompt tokens are said to be cached")
        elif cached and not delivered.request.use_prefix_cache and not delivered.num_given:
            self._complain(delivered, f"{cached} prompt tokens came from the cache, which it may not use")

    def _complain(self, delivered: Delivered, why: str) -> None:
        request = delivered.request
        self.wrong.append(
            f"{self._name(delivered)}: {why}\n"
            f"  {self.setup}\n  {request.sampling}, {len(request.prompt_token_ids)} prompt tokens, "
            f"{len(request.branches)} branches, priority {request.priority}, salt {request.cache_salt}, "
            f"cache {request.use_prefix_cache}, {delivered.num_given} tokens given, ended with {delivered.reason}\n"
            f"  repeat: {self.command(delivered.ended_after)}"
        )

    def _name(self, delivered: Delivered) -> str:
        return f"seed {self.seed}, request {delivered.request.request_id}, branch {delivered.branch}"

    def command(self, num_requests: int) -> str:
        """What repeats this round up to the moment when so many requests had come: those after it change nothing."""
        return f"python tests/differential/run.py --seed {self.seed} --requests {num_requests} --round {num_requests}"


def _is_plausible(cached: int, prompt: int, delivered: Delivered) -> bool:
    """Whole blocks, and of the prompt alone all but its last token, whose logits are needed."""
    if delivered.num_given and cached == prompt:
        return True
    return 0 <= cached < prompt and (cached % BLOCK_SIZE == 0 or cached == prompt - 1)


def _was_cached_whole(delivered: Delivered) -> bool:
    prompt = len(delivered.request.prompt_token_ids)
    return prompt > 1 and delivered.num_cached_tokens == prompt - 1 and prompt % BLOCK_SIZE == 0


def _worse(one: Judgement, other: Judgement) -> Judgement:
    order = [Verdict.EQUAL, Verdict.NEAR_TIE, Verdict.WRONG]
    return max(one, other, key=lambda judgement: order.index(judgement.verdict))
