"""Sessions: which group served a session last, so that its later requests prefer it."""

from __future__ import annotations

from collections import OrderedDict

from ..worker.messages import RouteQuery

_Key = tuple[str, str | None, str | None]


class Sessions:
    """The latest ``max_sessions`` sessions; a preference, never a limit."""

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._groups: OrderedDict[_Key, str] = OrderedDict()

    def groups_of(self, query: RouteQuery) -> tuple[str, ...]:
        """The group that served the query's session last; none if it is not remembered."""
        group = None if query.session_id is None else self._groups.get(_key(query))
        return () if group is None else (group,)

    def remember(self, query: RouteQuery, group: str) -> None:
        """``group`` has been chosen for a request of the session."""
        if query.session_id is None:
            return
        key = _key(query)
        self._groups[key] = group
        self._groups.move_to_end(key)
        if len(self._groups) > self._max_sessions:
            self._groups.popitem(last=False)


def _key(query: RouteQuery) -> _Key:
    """Two tenants may give their sessions the same name."""
    return query.model, query.tenant, query.session_id
