"""The groups that serve one model, and what is learned from all of them together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from ..worker.messages import GroupReport
from .group import Group, Priors
from .rates import DecayedRate, Mean

UTILISATION_HORIZON_S = 30.0
FIRST_PRIORS = Priors(prefill_tokens_per_s=5_000.0, step_s=0.02)
"""Before any group of the model has measured anything: all groups look alike, so only ratios count."""
PRIOR_OUTPUT_TOKENS = 128.0
_MAX_FENCES = 4096


class Pool:
    """The live groups of a model by name, each in its newest generation."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.groups: dict[str, Group] = {}
        self.output_tokens = Mean(PRIOR_OUTPUT_TOKENS)
        self._work = DecayedRate(UTILISATION_HORIZON_S)
        self._newest: dict[str, int] = {}
        self._priors: Priors | None = None

    def is_void(self, report: GroupReport) -> bool:
        """Whether a later generation of the same group has been seen."""
        return report.generation < self._newest.get(report.group, report.generation)

    def admit(self, report: GroupReport, create: Callable[[], Group]) -> Group:
        """The group that reports, made by ``create`` if this generation is new. Older ones must be gone by now."""
        self._priors = None
        self._newest.pop(report.group, None)
        self._newest[report.group] = report.generation
        if len(self._newest) > _MAX_FENCES:
            del self._newest[next(iter(self._newest))]
        group = self.groups.get(report.group)
        if group is None:
            group = self.groups[report.group] = create()
        return group

    def candidates(self, excluded_generations: Collection[int]) -> list[Group]:
        """Groups that may be given something new."""
        return [
            group
            for group in self.groups.values()
            if not group.report.draining and group.generation not in excluded_generations
        ]

    def silent(self, now: float, timeout_s: float) -> Iterator[Group]:
        """Groups whose last report is too old."""
        return (group for group in self.groups.values() if now - group.reported_at_s >= timeout_s)

    def remove(self, group: Group) -> None:
        self._priors = None
        del self.groups[group.name]

    @property
    def priors(self) -> Priors:
        """What to assume of a group that has not measured itself: the mean of those that have."""
        if self._priors is None:
            reports = [group.report for group in self.groups.values()]
            self._priors = Priors(
                _mean([report.prefill_tokens_per_s for report in reports], FIRST_PRIORS.prefill_tokens_per_s),
                _mean([report.decode_step_s for report in reports], FIRST_PRIORS.step_s),
            )
        return self._priors

    def add_work(self, work_s: float, now: float) -> None:
        """A group was given prefill work that will take it ``work_s``."""
        self._work.add(work_s, now)

    def utilisation(self, now: float) -> float:
        """Prefill work that arrived lately, as a share of the engine time that passed; may exceed 1."""
        return self._work.per_s(now) / max(1, len(self.groups))


def _mean(values: list[float], otherwise: float) -> float:
    measured = [value for value in values if value > 0]
    return sum(measured) / len(measured) if measured else otherwise
