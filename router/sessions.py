"""Sessions: which group served a session last, so that its later requests prefer it."""

from __future__ import annotations

from collections import OrderedDict


class Sessions:
    """The latest ``max_sessions`` sessions; a preference, never a limit."""

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._groups: OrderedDict[tuple[str, str], str] = OrderedDict()

    def groups_of(self, model: str, session_id: str | None) -> tuple[str, ...]:
        """The group that served the session last; none if it is not remembered."""
        group = None if session_id is None else self._groups.get((model, session_id))
        return () if group is None else (group,)

    def remember(self, model: str, session_id: str | None, group: str) -> None:
        """``group`` has been chosen for a request of the session."""
        if session_id is None:
            return
        self._groups[model, session_id] = group
        self._groups.move_to_end((model, session_id))
        if len(self._groups) > self._max_sessions:
            self._groups.popitem(last=False)
