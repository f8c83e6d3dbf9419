"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the stop string that is completed first, and keeps it from being sent.

    One Knuth-Morris-Pratt automaton for each stop string (Knuth, Morris, Pratt 1977): its state is the length of the
    longest suffix of the text that is a beginning of the stop string. The largest state is what has to be held back;
    no other text waits. Of several stop strings completed by the same character the longest counts.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """``include``: the stop string that was found is sent with the text before it."""
        self._stops = tuple(stops)
        self._include = include
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """The text that can be sent now. After ``found`` is set nothing more is."""
        if not self._stops:
            return text
        buffer = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            self.found = self._step(character)
            if self.found is not None:
                self._held = ""
                return buffer[: position if self._include else position - len(self.found)]
        border = len(buffer) if self._include else len(buffer) - max(self._states)
        self._held = buffer[border:]
        return buffer[:border]

    def flush(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        """Move every automaton by one character; the longest stop string that it completes, if any."""
        found: str | None = None
        for index, stop in enumerate(self._stops):
            state = self._states[index]
            while state and stop[state] != character:
                state = self._failures[index][state - 1]
            state += stop[state] == character
            self._states[index] = state
            if state == len(stop) and len(stop) > len(found or ""):
                found = stop
        return found


def _failure_table(stop: str) -> list[int]:
    """For each beginning of ``stop`` the length of its longest proper suffix that is again a beginning."""
    table = [0] * len(stop)
    length = 0
    for position in range(1, len(stop)):
        while length and stop[position] != stop[length]:
            length = table[length - 1]
        length += stop[position] == stop[length]
        table[position] = length
    return table
