"""Questions: what a gateway has asked the routers and waits for, and which of them it was asked of."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from ..worker.messages import RouteDecision, RouteQuery
from .router_lines import RouterLine

MOST_ASKED = 16_384
"""Requests of which is known which router had the last word; they are given up soon after it, or not at all."""


class LostTurn(Exception):
    """The router that a query was queued at does not answer, or does not know it any more."""


@dataclass(slots=True, eq=False)
class Question:
    """A query that has not been decided."""

    query: RouteQuery
    answer: asyncio.Future[RouteDecision]
    line: RouterLine | None = None
    """To the router that it was given to last."""
    is_queued: bool = False

    def end(self, decision: RouteDecision) -> None:
        if not self.answer.done():
            self.answer.set_result(decision)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Questions:
    """One for each request that is asked about at the moment; and the line of the last answer to those before."""

    def __init__(self) -> None:
        self._open: dict[str, Question] = {}
        self._asked_at: dict[str, RouterLine] = {}
        """The latest last."""

    @property
    def is_any_queued(self) -> bool:
        return any(question.is_queued for question in self._open.values())

    def open(self, query: RouteQuery) -> Question:
        question = Question(query, asyncio.get_running_loop().create_future())
        self._open[query.request_id] = question
        return question

    def close(self, question: Question) -> None:
        """It is decided or given up."""
        request_id = question.query.request_id
        del self._open[request_id]
        self._asked_at.pop(request_id, None)
        if question.line is not None:
            self._asked_at[request_id] = question.line
        if len(self._asked_at) > MOST_ASKED:
            del self._asked_at[next(iter(self._asked_at))]

    def take_line(self, request_id: str) -> RouterLine | None:
        """Of a request that is given up after its question was closed: the router that has it, if any."""
        return self._asked_at.pop(request_id, None)

    def at(self, request_id: str, line: RouterLine) -> Question | None:
        """The open one of this request, if it was given to that router."""
        question = self._open.get(request_id)
        return question if question is not None and question.line is line else None

    def is_at(self, request_id: str, line: RouterLine) -> bool:
        """That router has the request, and is to keep it."""
        question = self._open.get(request_id)
        return (question.line if question else self._asked_at.get(request_id)) is line

    def queued_at(self, line: RouterLine) -> list[Question]:
        return wanted([each for each in self._open.values() if each.is_queued and each.line is line])


def wanted(questions: Iterable[Question]) -> list[Question]:
    """Those that have not been answered or given up."""
    return [question for question in questions if not question.answer.done()]
