"""What ``octavo top`` draws of an Overview."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from rich.box import SIMPLE_HEAD
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .overview import Group, Latency, Model, Overview, Rank

WIDE = 110
"""Characters of a line."""

_GIB = 2**30
_BUSY = 0.9

Row: TypeAlias = dict[str, str | Text]
"""Heading → cell."""


def screen(view: Overview, source: str, width: int) -> RenderableType:
    """Everything, as high as it is; below ``WIDE`` characters without what is wanted the least."""
    is_wide = width >= WIDE
    tables = [
        _table([_of_model(model, is_wide) for model in view.models]),
        _table([_of_group(group, is_wide) for group in view.groups]),
        _table([_of_rank(group, rank) for group in view.groups for rank in group.ranks]),
    ]
    return Stack(Text(f"Octavo  {source}  last {view.seconds:.0f} s", style="bold"), *tables, _decisions(view))


def _table(rows: Sequence[Row]) -> Table:
    """The first column is a name, the others are numbers; headings are those of the first row."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, heading in enumerate(rows[0] if rows else ()):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    return table


def _of_model(model: Model, is_wide: bool) -> Row:
    row: Row = {
        "model": model.model,
        "run": str(model.num_in_flight),
        "queue": str(model.num_queued),
        "req/s": f"{model.requests_per_s:.1f}",
        "tok/s": f"{model.generated_tokens_per_s:.0f}",
        "TTFT p50/99": _span(model.ttft),
        "ITL p50/99": _span(model.itl),
    }
    if is_wide:
        row |= {"prompt tok/s": f"{model.prompt_tokens_per_s:.0f}", "e2e p50/99": _span(model.e2e)}
    return row


def _of_group(group: Group, is_wide: bool) -> Row:
    row: Row = {
        "group": group.group,
        "known": Text(group.knowledge or "-", style="" if group.knowledge == "exact" else "yellow"),
        "run": str(group.num_running),
        "wait": str(group.num_waiting),
        "KV": Text(f"{group.kv_usage:.0%}", style="red" if group.kv_usage > _BUSY else ""),
        "hits": _or_dash(group.hit_rate, "{:.0%}".format),
        "tok/s": f"{group.generated_tokens_per_s:.0f}",
        "prefill p50/99": _span(group.prefill),
    }
    if is_wide:
        row |= {
            "queue p50/99": _span(group.queue),
            "computed/s": f"{group.computed_tokens_per_s:.0f}",
            "preempted/s": f"{group.preemptions_per_s:.1f}",
            "blocks": str(group.num_blocks),
        }
    return row


def _of_rank(group: Group, rank: Rank) -> Row:
    used, total = rank.gpu_memory_used_bytes, rank.gpu_memory_total_bytes
    return {
        "rank": f"{group.group}/{rank.rank}",
        "cores": f"{rank.cpu_cores:.2f}",
        "memory": _or_dash(rank.resident_bytes, lambda value: f"{value / _GIB:.2f} GiB"),
        "GPU": _or_dash(rank.gpu_utilization, "{:.0%}".format),
        "GPU memory": "-" if used is None or total is None else f"{used / _GIB:.1f} / {total / _GIB:.0f} GiB",
        "power": _or_dash(rank.gpu_power_watts, "{:.0f} W".format),
    }


def _decisions(view: Overview) -> Text:
    made = [f"{reason} {rate:.1f}" for reason, rate in view.decisions_per_s.items() if rate > 0.0]
    line = f"decisions/s  {'  '.join(made) or '-'}    moved/s {view.failovers_per_s:.1f}"
    fallen = view.fallback_routes_per_s
    return Text(f"{line}    without a router/s {fallen:.1f}", style="red" if fallen else "")


def _span(latency: Latency) -> str:
    return f"{_seconds(latency.p50_s)}/{_seconds(latency.p99_s)}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.0f}ms" if value < 1.0 else f"{value:.1f}s"


def _or_dash(value: float | None, shown: Callable[[float], str]) -> str:
    return "-" if value is None else shown(value)
