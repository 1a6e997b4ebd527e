"""What settings other than the given ones would have been like: the columns and the sentences.

The same in the terminal and on the page.
"""

from __future__ import annotations

import math

from pagedkv.simulate.headline import first_tokens_after
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
    """What to know first: how it was, what would have been best, how little would have done."""
    base = result.base
    found = [
        f"{_capital(base_in_words(result))} ({in_words(result, base)}): {_state(result, base)}."
    ]
    if result.measured_ttft_s is not None:
        found.append(f"{_capital(MEASURED)}: {first_tokens_after(result.measured_ttft_s)}.")
    others = [row for row in result.rows if not row.is_base]
    began = [row.scheme.began for row in result.rows if not row.scheme.refused]
    all_began = len(set(began)) <= 1
    for key, what, sign in (
        ("hit_rate_first", "The highest hit rate", -1.0),
        ("ttft_s.p99", "The shortest TTFT p99", 1.0),
    ):
        metric = metric_by_key(key)
        known = [
            (sign * value, row)
            for row in (base, *others)  # of equal ones, the base first
            if (value := metric.read(row.scheme)) is not None and not row.scheme.refused
        ]
        if known and (key != "ttft_s.p99" or all_began):
            best = min(known, key=lambda pair: pair[0])[1]
            shown = show_metric(metric, best.scheme)
            where = base_in_words(result) if best.is_base else f"with {in_words(result, best)}"
            found.append(f"{what}, {shown} {unit_of(result, metric)}, comes {where}.")
    if not all_began:
        found.append(
            f"Before the time given was over {min(began):,} to {max(began):,} requests began: "
            "times to first token are of those alone, and to be compared only where as many did."
        )
    calm = [row for row in result.rows if not row.scheme.preemptions and not row.scheme.refused]
    if calm and shows_blocks(result):
        fewest = min(row.num_blocks * row.block_size for row in calm)
        # Block sizes do not all divide the memory: what differs by less than 1 % is as large.
        smallest = [row for row in calm if row.num_blocks * row.block_size < 1.01 * fewest]
        least = next((row for row in smallest if row.is_base), smallest[0])
        found.append(
            f"The least memory without a preemption is {least.num_blocks:,} blocks of "
            f"{least.block_size} tokens ({in_words(result, least)})."
        )
    return tuple(found)


def in_words(result: WhatIfResult, row: WhatIfRow) -> str:
    """The choice of a row: `num-blocks 2x, block-size 8`."""
    return ", ".join(f"{name} {value}" for name, value in zip(result.names, row.values))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _state(result: WhatIfResult, row: WhatIfRow) -> str:
    scheme = row.scheme
    parts = []
    if scheme.hit_rate_first is not None:
        parts.append(f"{100 * scheme.hit_rate_first:.1f} % of the prompt tokens hit")
    waste = WASTE.read(scheme)
    if waste is not None:
        parts.append(f"{show_number(100 * waste, 2)} % of the held slots are empty")
    parts.append(f"{scheme.preemptions:,} preemption{'' if scheme.preemptions == 1 else 's'}")
    if math.isfinite(scheme.ttft_s.p50):
        parts.append(
            _after_steps(scheme.ttft_s) if is_by_step(result) else first_tokens_after(scheme.ttft_s)
        )
    return ", ".join(parts)


def _after_steps(waited: Percentiles) -> str:
    p50, p99 = show_number(waited.p50, None), show_number(waited.p99, None)
    return f"first tokens after {p50} steps (p50) and {p99} steps (p99)"
