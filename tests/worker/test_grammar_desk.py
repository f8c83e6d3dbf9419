"""A request whose grammar is being compiled reaches the engine ahead of what is said of it meanwhile; nobody waits."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

import pytest
from engine_bench import request

from octavo.worker.admission import Refusal
from octavo.worker.grammar import Prototype
from octavo.worker.grammar_desk import GrammarDesk
from octavo.worker.messages import Request

KNOWN = Prototype(None, "known")


class SlowCompiler:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.threads: list[threading.Thread] = []

    def known(self, grammar: str) -> Prototype | None:
        return KNOWN if grammar == "known" else None

    def prepare(self, grammar: str) -> Prototype:
        self.threads.append(threading.current_thread())
        self.may_go_on.wait()
        if grammar == "unheard of":
            raise ValueError
        return Prototype(None, grammar)


@dataclass
class Line:
    """Writes down what the engine is told."""

    refusal: Refusal | None = None
    said: list[str] = field(default_factory=list)
    held: list[object] = field(default_factory=list)

    def let_in(self, request: Request) -> Refusal | None:
        return self.refusal

    def take(self, request: Request, holding: object = None) -> None:
        self.said.append(request.request_id)
        self.held.append(holding)

    def abort(self, request_ids: tuple[str, ...], branch: int | None = None) -> None:
        self.said += [f"abort {request_id}" for request_id in request_ids]

    async def has_heard(self, num_calls: int) -> list[str]:
        while len(self.said) < num_calls:
            await asyncio.sleep(0.001)
        return self.said


@pytest.fixture
def compiler() -> SlowCompiler:
    return SlowCompiler()


@pytest.fixture
def desk(compiler: SlowCompiler) -> GrammarDesk:
    return GrammarDesk(compiler)  # type: ignore[arg-type]


async def test_what_needs_no_compiling_goes_on_at_once(desk: GrammarDesk, compiler: SlowCompiler) -> None:
    line = Line()
    desk.submit(request("plain"), line)
    desk.submit(request("known", grammar="known"), line)
    desk.abort(("plain", "known", "unheard of"), None, line)
    assert line.said == ["plain", "known", "abort plain", "abort known", "abort unheard of"]
    assert line.held == [None, KNOWN]
    assert not compiler.threads


async def test_what_is_said_meanwhile_of_a_request_keeps_its_place(desk: GrammarDesk, compiler: SlowCompiler) -> None:
    line = Line()
    assert desk.submit(request("slow", grammar="new"), line) is None
    desk.abort(("slow", "other"), None, line)
    desk.submit(request("slow", grammar="new"), line)
    desk.submit(request("other", grammar="known"), line)
    assert line.said == ["abort other", "other"]
    compiler.may_go_on.set()
    assert await line.has_heard(5) == ["abort other", "other", "slow", "abort slow", "slow"]
    assert line.held[1:] == [Prototype(None, "new")] * 2
    desk.abort(("slow",), None, line)
    assert line.said[5:] == ["abort slow"]
    assert threading.main_thread() not in compiler.threads
    desk.close()


async def test_a_compiler_that_fails_is_the_engines_to_tell_of(desk: GrammarDesk, compiler: SlowCompiler) -> None:
    line = Line()
    desk.submit(request("failed", grammar="unheard of"), line)
    compiler.may_go_on.set()
    assert await line.has_heard(1) == ["failed"]
    desk.close()


async def test_a_full_queue_compiles_nothing(desk: GrammarDesk, compiler: SlowCompiler) -> None:
    line = Line(Refusal("full", 1.0))
    assert desk.submit(request("refused", grammar="new"), line) == line.refusal
    assert not compiler.threads
    assert line.said == []
