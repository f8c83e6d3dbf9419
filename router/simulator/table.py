"""The results of several policies as a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .metrics import Result, Times

_HEADINGS = ("policy", "block hits", "TTFT mean / p50 / p90 / p99, s", "ITL mean / p50 / p90 / p99, ms")
_MORE_HEADINGS = ("goodput", "imbalance", "busy", "preempted", "refused")


def table_rows(
    results: Mapping[str, Result], infinite_hit_rate: float, *, slo_ttft_s: float, slo_itl_s: float
) -> list[tuple[str, ...]]:
    """Headings, a row for each policy by name, and one for what no policy can pass."""
    rows: list[tuple[str, ...]] = [(*_HEADINGS, *_MORE_HEADINGS)]
    rows += [_row(name, result, result.goodput(slo_ttft_s, slo_itl_s)) for name, result in results.items()]
    rows.append(("infinite cache", f"{infinite_hit_rate:.3f}", *[""] * (len(rows[0]) - 2)))
    return rows


def table(rows: Sequence[Sequence[str]]) -> str:
    """``rows`` under each other, a rule below the first."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _row(name: str, result: Result, goodput: float) -> tuple[str, ...]:
    return (
        name,
        f"{result.block_hit_rate:.3f}",
        _cell(result.time_to_first_token, 1.0, 3),
        _cell(result.inter_token, 1e3, 1),
        f"{goodput:.1%}",
        f"{result.imbalance:.2f}",
        f"{result.utilisation:.0%}",
        str(result.num_preemptions),
        str(result.num_refused),
    )


def _cell(times: Times, factor: float, digits: int) -> str:
    return " / ".join(f"{time * factor:.{digits}f}" for time in times)
