"""What settings other than the given ones would have been like: the columns and the sentences.

The same in the terminal and on the page.
"""

from __future__ import annotations

import math

from pagedkv.simulate.metrics import (
    WASTE,
    Metric,
    metric_by_key,
    show_metric,
    show_number,
    unit_in_steps,
)
from pagedkv.simulate.results import Percentiles, WhatIfResult, WhatIfRow

COLUMNS: tuple[Metric, ...] = (
    metric_by_key("hit_rate_first"),
    WASTE,
    metric_by_key("preemptions"),
    metric_by_key("ttft_s.p50"),
    metric_by_key("ttft_s.p99"),
    metric_by_key("output_tokens_per_s"),
)
"""What is shown of each row; the JSON has every metric."""

MEASURED = "measured in that run"
"""What stands beside the base of a recorded run whose times are known."""

_LISTED = 3
"""Choices that a sentence names at most, but for one more where that is the last."""

CHARTED: tuple[Metric, ...] = (COLUMNS[0], COLUMNS[1], COLUMNS[2], COLUMNS[4])


def columns_of(result: WhatIfResult) -> list[Metric]:
    """The columns that any row has something in."""
    return [m for m in COLUMNS if any(m.read(row.scheme) is not None for row in result.rows)]


def shows_blocks(result: WhatIfResult) -> bool:
    """Whether the number of blocks differs from row to row and no varied setting names it."""
    return len({row.num_blocks for row in result.rows}) > 1


def is_by_step(result: WhatIfResult) -> bool:
    """Whether time is counted in steps, and the steps of the run are repeated."""
    return bool(result.settings.get("by-step"))


def base_in_words(result: WhatIfResult) -> str:
    """What the row of the base shows: the run itself, or the run simulated without a change."""
    return "as it was" if is_by_step(result) else "simulated at its own settings"


def measured_value(result: WhatIfResult, metric: Metric) -> float | None:
    """What was measured of it in the recorded run, in the base unit; None where nothing was."""
    if result.measured_ttft_s is None or not metric.key.startswith("ttft_s."):
        return None
    return float(getattr(result.measured_ttft_s, metric.key.removeprefix("ttft_s.")))


def measured_of(result: WhatIfResult, metric: Metric) -> str:
    """The same as it is shown; empty where nothing was measured."""
    value = measured_value(result, metric)
    return "" if value is None else show_number(value * metric.scale, metric.decimals)


def unit_of(result: WhatIfResult, metric: Metric) -> str:
    """The unit of a metric: seconds are steps where those are counted."""
    return unit_in_steps(metric.unit) if is_by_step(result) else metric.unit


def sentences(result: WhatIfResult) -> tuple[str, ...]:
    """What to know first: how it was, what would have been best, how little would have done.

    Numbers are those of the table, in its units and to its decimals, and what is equal there is
    told as equal. Choices that refused requests served other traffic: they are never the best, and
    named as left out.
    """
    base = result.base
    found = [
        f"{_capital(base_in_words(result))} ({in_words(result, base)}): {_state(result, base)}."
    ]
    if result.measured_ttft_s is not None:
        found.append(f"{_capital(MEASURED)}: {_first_tokens(result, result.measured_ttft_s)}.")
    told = len(found)
    served = [row for row in result.rows if not row.scheme.refused]
    began = [row.scheme.began for row in served]
    all_began = len(set(began)) <= 1
    for key, what, best_of in (
        ("hit_rate_first", "The highest hit rate", max),
        ("ttft_s.p99", "The shortest TTFT p99", min),
    ):
        metric = metric_by_key(key)
        known = [row for row in served if metric.read(row.scheme) is not None]
        if known and (key != "ttft_s.p99" or all_began):
            best = best_of(known, key=lambda row: metric.read(row.scheme) or 0.0)
            shown = show_metric(metric, best.scheme)
            alike = [row for row in known if show_metric(metric, row.scheme) == shown]
            where = _where(result, alike)
            found.append(f"{what}, {shown} {unit_of(result, metric)}, comes {where}.")
    if not all_began:
        found.append(
            f"Before the time given was over {min(began):,} to {max(began):,} requests began: "
            "times to first token are of those alone, and to be compared only where as many did."
        )
    calm = [row for row in served if not row.scheme.preemptions]
    if calm and shows_blocks(result):
        found.append(_least_memory(result, calm))
    refusing = [row for row in result.rows if row.scheme.refused]
    if refusing and len(found) > told:
        listed = [f"{in_words(result, r)} ({len(r.scheme.refused):,})" for r in refusing[:_LISTED]]
        found.append(f"Left out of these, for the requests refused: {_all_of(listed, refusing)}.")
    return tuple(found)


def in_words(result: WhatIfResult, row: WhatIfRow) -> str:
    """The choice of a row: `num-blocks 2x, block-size 8`."""
    return ", ".join(f"{name} {value}" for name, value in zip(result.names, row.values))


def _where(result: WhatIfResult, rows: list[WhatIfRow]) -> str:
    """Where something comes: `with num-blocks 2x, block-size 8 or 16`, the base first."""
    if len(rows) == len(result.rows) > 1:
        return "with every choice"
    others = [row for row in rows if not row.is_base]
    parts = [base_in_words(result)] if len(others) < len(rows) else []
    if others:
        parts.append(f"with {_choices(result, others)}")
    return " and ".join(parts)


def _choices(result: WhatIfResult, rows: list[WhatIfRow]) -> str:
    """Several choices: `num-blocks 2x, block-size 8 or 16` where they differ in one setting."""
    values = [list(dict.fromkeys(column)) for column in zip(*(row.values for row in rows))]
    if sum(len(column) > 1 for column in values) <= 1 and len(rows) <= _LISTED + 1:
        return ", ".join(
            f"{name} {' or '.join(filter(None, (', '.join(column[:-1]), column[-1])))}"
            for name, column in zip(result.names, values)
        )
    return _all_of([in_words(result, row) for row in rows[:_LISTED]], rows)


def _all_of(listed: list[str], rows: list[WhatIfRow]) -> str:
    more = len(rows) - len(listed)
    return "; ".join([*listed, f"{more:,} more"] if more else listed)


def _least_memory(result: WhatIfResult, calm: list[WhatIfRow]) -> str:
    """The smallest memory of those that were tried and had no preemption."""

    def slots(row: WhatIfRow) -> int:
        return row.num_blocks * row.block_size

    # Block sizes do not all divide the memory: what differs by less than 1 % is as large.
    as_large = 1.01 * min(map(slots, calm))
    smallest = [row for row in calm if slots(row) < as_large]
    least = next((row for row in smallest if row.is_base), smallest[0])
    in_other_blocks = (
        ", or as much in blocks of another size"
        if len({row.block_size for row in smallest}) > 1
        else ""
    )
    end = "" if min(map(slots, result.rows)) * 1.01 < as_large else "; none smaller was tried"
    return (
        f"The least memory tried without a preemption is {least.num_blocks:,} blocks of "
        f"{least.block_size} tokens{in_other_blocks} ({_choices(result, smallest)}){end}."
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _state(result: WhatIfResult, row: WhatIfRow) -> str:
    scheme = row.scheme
    parts = []
    if scheme.hit_rate_first is not None:
        parts.append(f"{show_metric(COLUMNS[0], scheme)} % of the prompt tokens hit")
    if WASTE.read(scheme) is not None:
        parts.append(f"{show_metric(WASTE, scheme)} % of the held slots are empty")
    parts.append(f"{scheme.preemptions:,} preemption{'' if scheme.preemptions == 1 else 's'}")
    if scheme.refused:
        parts.append(f"{len(scheme.refused):,} refused")
    if math.isfinite(scheme.ttft_s.p50):
        parts.append(_first_tokens(result, scheme.ttft_s))
    return ", ".join(parts)


def _first_tokens(result: WhatIfResult, waited: Percentiles) -> str:
    unit = "steps" if is_by_step(result) else "s"
    p50, p99 = show_number(waited.p50, None), show_number(waited.p99, None)
    return f"first tokens after {p50} {unit} (p50) and {p99} {unit} (p99)"
