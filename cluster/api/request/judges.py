"""Judges: those of all models that a gateway serves, found by the name that a body says."""

from __future__ import annotations

from collections.abc import Sequence

from ....worker.errors import InvalidRequest, ModelNotFound
from ..service import ServedModel
from .judged import RequestJudge

_SHOWN_NAMES = 20


class Judges:
    """At least one. Names differ."""

    def __init__(self, judges: Sequence[RequestJudge]) -> None:
        self._by_name = {judge.model.name: judge for judge in judges}

    @property
    def models(self) -> list[ServedModel]:
        """In the order of the configuration."""
        return [judge.model for judge in self._by_name.values()]

    def named(self, name: str) -> RequestJudge:
        """Raises ModelNotFound for a name that is not served."""
        if (judge := self._by_name.get(name)) is None:
            raise ModelNotFound(f"The model '{name[:64]}' does not exist; this server has {self._names()}.")
        return judge

    def named_or_only(self, name: str | None) -> RequestJudge:
        """Where the name may be left out. Raises InvalidRequest where it says nothing because there are several."""
        if name is not None:
            return self.named(name)
        if len(self._by_name) > 1:
            raise InvalidRequest(f"model must be given: this server has {self._names()}.", param="model")
        return next(iter(self._by_name.values()))

    def close(self) -> None:
        """End their threads."""
        for judge in self._by_name.values():
            judge.close()

    def _names(self) -> str:
        names = [f"'{name}'" for name in self._by_name]
        more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
        return ", ".join(names[:_SHOWN_NAMES]) + more
