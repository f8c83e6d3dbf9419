"""A request whose grammar is being compiled reaches the engine before what is said of it meanwhile."""

from __future__ import annotations

import asyncio
import threading

from engine_bench import request

from octavo.worker.errors import InvalidRequest
from octavo.worker.grammar_desk import GrammarDesk


class SlowCompiler:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.threads: list[threading.Thread] = []
        self.known = {"known"}

    def is_known(self, grammar: str) -> bool:
        return grammar in self.known

    def prepare(self, grammar: str) -> None:
        self.threads.append(threading.current_thread())
        self.may_go_on.wait()
        if grammar == "bad":
            raise InvalidRequest("it is bad", param="grammar")


async def test_what_needs_no_compiling_goes_on_at_once() -> None:
    compiler, taken = SlowCompiler(), []
    desk = GrammarDesk(compiler)  # type: ignore[arg-type]
    await desk.submit(request("plain"), taken.append)
    await desk.submit(request("known", grammar="known"), taken.append)
    await desk.settled(["plain", "known", "unheard of"])
    assert [each.request_id for each in taken] == ["plain", "known"]
    assert not compiler.threads


async def test_an_abort_waits_for_its_request_and_for_no_other() -> None:
    compiler, said = SlowCompiler(), []
    desk = GrammarDesk(compiler)  # type: ignore[arg-type]

    async def submit(name: str, grammar: str) -> None:
        await desk.submit(request(name, grammar=grammar), lambda each: said.append(f"submit {each.request_id}"))

    async def abort(name: str) -> None:
        await desk.settled([name])
        said.append(f"abort {name}")

    submits = [asyncio.create_task(submit("slow", "new")), asyncio.create_task(submit("refused", "bad"))]
    await asyncio.sleep(0)
    aborting = asyncio.create_task(abort("slow"))
    await submit("other", "known")
    await abort("other")
    compiler.may_go_on.set()
    await asyncio.gather(*submits, aborting)
    assert said[:2] == ["submit other", "abort other"]
    assert said.index("submit slow") < said.index("abort slow")
    assert "submit refused" in said  # the engine ends it with the reason
    assert threading.main_thread() not in compiler.threads
    desk.close()
