"""The report's charts as plain dictionaries for plotly.js.

Each figure is `{"data": [...], "layout": {...}}`. A colour is written as the name of a CSS
variable (`"--kind-cached"`); the page puts in its value, light or dark, each time it draws. So
no figure is drawn twice, and building them needs no plotly.graph_objects, whose import alone
takes longer than writing the report.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.simulate.headline import (
    curve_bytes,
    hit_rate_at,
    show_bytes,
    show_seconds,
    simulated_blocks,
)
from pagedkv.simulate.palette import SHARED, STYLES
from pagedkv.simulate.results import (
    KINDS,
    HitRateCurve,
    MemoryMap,
    SchemeResult,
    SimulationResult,
)

Figure = dict[str, Any]

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
"""How the lines of the schemes differ besides their colour, in the order of the schemes."""

PERCENT = {
    "range": [0, 100],
    "tickvals": [0, 25, 50, 75, 100],
    "ticktext": ["0 %", "25 %", "50 %", "75 %", "100 %"],
    "fixedrange": True,
}
"""An axis of shares, always whole, so that charts side by side compare."""

DARK_TEXT_ON = ("reserved", "never_used", "unusable", "cached")


def scheme_name(scheme: SchemeResult) -> str:
    """The scheme with its placement, as it is called all over the report."""
    return scheme.scheme if scheme.placement is None else f"{scheme.scheme}, {scheme.placement}"


def scheme_colour(index: int) -> str:
    """The CSS variable with the colour of the `index`-th scheme's lines."""
    return f"--scheme-{index % 4}"


def share_bars(result: SimulationResult) -> Figure:
    """One bar a scheme: the KV memory cut by kind, time-weighted."""
    names = [_plotly_text(scheme_name(s)).replace(", ", "<br>") for s in result.schemes]
    capacity = _capacity_bytes(result)
    data = []
    for kind in KINDS:
        percent = [100 * scheme.share[kind] for scheme in result.schemes]
        if max(percent) < 0.05 and kind != "token_states":
            continue
        size = [f" ({show_bytes(capacity * value / 100)})" if capacity else "" for value in percent]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": STYLES[kind].label,
                "y": names,
                "x": _rounded(np.array(percent), 3),
                "text": [f"{value:.1f} %" if value >= 6 else "" for value in percent],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "constraintext": "inside",
                "textfont": {"color": _text_colour_on(kind)},
                "customdata": size,
                "hovertemplate": f"{STYLES[kind].label}: %{{x:.1f}} %%{{customdata}}"
                "<extra></extra>",
                "marker": {
                    "color": f"--kind-{kind}",
                    "line": {"color": "--card", "width": 1},
                },
            }
        )
    layout = {
        "barmode": "stack",
        "uniformtext": {"mode": "hide", "minsize": 10},  # a number that does not fit goes away
        "bargap": 0.28,
        "xaxis": PERCENT,
        "yaxis": {"autorange": "reversed", "automargin": True, "fixedrange": True},
        "margin": {"l": 10, "r": 26, "t": 8, "b": 32},
        "height": 60 + 56 * len(names),
    }
    return {"data": data, "layout": layout}


def memory_over_time(scheme: SchemeResult, result: SimulationResult) -> Figure:
    """The memory by kind, stacked, over the time that the longest scheme took."""
    timeline = scheme.timeline
    time = time_axis(result)
    edges = _rounded(np.append(timeline.start_s, timeline.end_s[-1:]) / time.divisor, 4)
    data = []
    for i, kind in enumerate(KINDS):
        share = 100 * timeline.share[:, i]
        if not len(share) or share.max() < 0.05:
            continue
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": STYLES[kind].label,
                "x": edges,
                # the last interval is drawn up to its end
                "y": _rounded(np.append(share, share[-1:]), 2),
                "stackgroup": "memory",
                "line": {"width": 0, "shape": "hv", "color": f"--kind-{kind}"},
                "fillcolor": f"--kind-{kind}",
                "hovertemplate": "%{y:.1f} %",
            }
        )
    layout = {
        "hovermode": "x unified",
        "xaxis": time.layout(),
        "yaxis": PERCENT,
        "margin": {"l": 50, "r": 14, "t": 10, "b": 42},
        "height": 250,
        "annotations": _end_of_run(scheme, time),
    }
    return {"data": data, "layout": layout}


def _end_of_run(scheme: SchemeResult, time: TimeAxis) -> list[dict[str, Any]]:
    """A word in the empty part of a chart, where a scheme is done long before the longest one."""
    end = float(scheme.timeline.end_s[-1]) / time.divisor if len(scheme.timeline.end_s) else 0.0
    if end > 0.72 * time.end:
        return []
    return [
        {
            "x": end,
            "y": 50,
            "text": f"all done after<br>{show_seconds(end * time.divisor)}",
            "showarrow": False,
            "xanchor": "left",
            "xshift": 8,
            "align": "left",
        }
    ]


def memory_map(scheme: SchemeResult, result: SimulationResult) -> Figure:
    """The physical memory: blocks down, time across, each cell in the colour of its kind."""
    recorded = scheme.memory_map
    time = time_axis(result)
    cells = map_cells(recorded)
    blocks_per_row = recorded.slots_per_row / result.block_size
    colours = [f"--kind-{kind}" for kind in KINDS] + ["--kind-shared"]
    steps = len(colours)
    scale = [
        [edge / steps, colour]
        for i, colour in enumerate(colours)
        for edge in (i, i + 1)  # both ends of a step have its colour: no blending between kinds
    ]
    trace = {
        "type": "heatmap",
        "x": _rounded(recorded.time_s / time.divisor, 4),
        "y0": blocks_per_row / 2,
        "dy": blocks_per_row,
        # base64 of one byte a cell, row by row; the page unpacks it into `z` and `text`
        "cells": {
            "rows": cells.shape[0],
            "columns": cells.shape[1],
            "base64": base64.b64encode(cells.tobytes()).decode("ascii"),
            "names": [STYLES[kind].label for kind in KINDS] + [SHARED.label],
        },
        "colorscale": scale,
        "zmin": -0.5,
        "zmax": steps - 0.5,
        "showscale": False,
        "hovertemplate": f"%{{x:.4~g}} {time.unit}, block %{{y:,.0f}}: %{{text}}<extra></extra>",
    }
    layout = {
        "xaxis": {**time.layout(), "showgrid": False},
        "yaxis": {
            "range": [result.num_blocks, 0],
            "title": {"text": "physical block"},
            "tickformat": ",d",
            "showgrid": False,
            "zeroline": False,
            "fixedrange": True,
            "nticks": 5,
        },
        "margin": {"l": 64, "r": 14, "t": 6, "b": 42},
        "height": 300,
    }
    return {"data": [trace], "layout": layout}


def map_cells(recorded: MemoryMap) -> NDArray[np.uint8]:
    """The map's kinds, with `len(KINDS)` where token states are shared."""
    shared = (recorded.kind == KINDS.index("token_states")) & (recorded.shared > 0)
    return np.where(shared, len(KINDS), recorded.kind).astype(np.uint8)


def requests_over_time(result: SimulationResult, which: str) -> Figure:
    """Requests `which` are "running" or "waiting", a line for each scheme."""
    time = time_axis(result)
    data = []
    for i, scheme in enumerate(result.schemes):
        timeline = scheme.timeline
        values = timeline.running if which == "running" else timeline.waiting
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": _plotly_text(scheme_name(scheme)),
                "x": _rounded(np.append(timeline.start_s, timeline.end_s[-1:]) / time.divisor, 4),
                "y": _rounded(np.append(values, values[-1:]), 3),
                "line": {
                    "shape": "hv",
                    "color": scheme_colour(i),
                    "width": 2.5 if scheme.scheme == "paged" else 1.75,
                    "dash": DASHES[i % len(DASHES)],
                },
                "hovertemplate": "%{y:,.1f}",
            }
        )
    layout = {
        "hovermode": "x unified",
        "xaxis": time.layout(),
        "yaxis": {"rangemode": "tozero", "tickformat": ",~g", "fixedrange": True, "nticks": 6},
        "margin": {"l": 52, "r": 14, "t": 6, "b": 42},
        "height": 250,
    }
    return {"data": data, "layout": layout}


def hit_rate_curve(curve: HitRateCurve, result: SimulationResult) -> Figure:
    """The exact LRU hit rate over the size of memory, logarithmic, with the sizes worth naming."""
    known = curve.blocks >= 1  # a logarithmic axis has no zero
    blocks, rate = curve.blocks[known], 100 * curve.hit_rate[known]
    here = max(simulated_blocks(curve, result), 1)
    ceiling = 100 * curve.ceiling
    largest = max(int(blocks[-1]) if len(blocks) else 1, here)
    # from where it leaves the ground: the flat beginning is worth no width
    leaves = int(blocks[(rate >= 0.01 * ceiling).argmax()]) if len(blocks) else here
    right = math.log10(largest) + 0.12
    left = min(math.log10(min(leaves, here)), right - 1) - 0.15
    marks = sorted(curve.smallest.items())
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "hit rate",
            "x": [*blocks.tolist(), 10**right],
            "y": [*_rounded(rate, 4), ceiling],
            "line": {"shape": "hv", "width": 2.5, "color": "--accent"},
            "hovertemplate": "%{x:,.0f} blocks: %{y:.2f} %<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "lines",
            "name": "ceiling",
            "x": [10**left, 10**right],
            "y": [ceiling, ceiling],
            "xaxis": "x2",  # an axis without a trace is not drawn
            "line": {"dash": "dot", "width": 1.25, "color": "--muted"},
            "hoverinfo": "skip",
        },
        {
            "type": "scatter",
            "mode": "markers+text",
            "name": "share of the ceiling",
            "x": [size for _, size in marks],
            "y": [round(100 * hit_rate_at(curve, size), 4) for _, size in marks],
            "text": [f"{100 * share:g} %" for share, _ in marks],
            # below the curve, which rises to the right, there is room, at its end above it
            "textposition": ["bottom right"] * (len(marks) - 1) + ["top center"],
            "marker": {"size": 9, "color": "--card", "line": {"width": 2, "color": "--accent"}},
            "customdata": [_size_in_words(curve, size, result) for _, size in marks],
            "hovertemplate": "%{text} of the ceiling<br>%{customdata}: %{y:.2f} %<extra></extra>",
            "cliponaxis": False,
        },
        {
            "type": "scatter",
            "mode": "markers+text",
            "name": "the memory simulated here",
            "x": [here],
            "y": [round(100 * hit_rate_at(curve, here), 4)],
            "text": ["this memory"],
            "textposition": "top right"
            if math.log10(here) < left + 0.25 * (right - left)
            else "top left",
            "textfont": {"color": "--here"},
            "marker": {"size": 12, "symbol": "diamond", "color": "--here"},
            "customdata": [_size_in_words(curve, here, result)],
            "hovertemplate": "the memory simulated here<br>%{customdata}: %{y:.2f} %"
            "<extra></extra>",
            "cliponaxis": False,
        },
    ]
    layout: dict[str, Any] = {
        "xaxis": {
            "type": "log",
            "range": [left, right],
            "dtick": 1,
            "tickformat": ",~s",
            "title": {"text": f"blocks of {curve.block_size} tokens"},
        },
        "xaxis2": {
            "type": "log",
            "matches": "x",
            "overlaying": "x",
            "side": "top",
            "showgrid": False,
            "ticks": "outside",
            "showticklabels": result.bytes_per_token is not None,
            **_byte_ticks(curve, result, left, right),
        },
        "yaxis": {
            "range": [0, max(ceiling * 1.12, 1.0)],
            "ticksuffix": " %",
            "fixedrange": True,
            "nticks": 6,
        },
        "margin": {"l": 52, "r": 18, "t": 34, "b": 46},
        "height": 380,
    }
    return {"data": data, "layout": layout}


def _byte_ticks(
    curve: HitRateCurve, result: SimulationResult, left: float, right: float
) -> dict[str, Any]:
    """Ticks of the upper axis: round sizes in bytes, at their place in blocks."""
    one = curve_bytes(curve, 1, result)
    if one is None:
        return {"tickvals": []}
    low, high = math.log2(one) + left * math.log2(10), math.log2(one) + right * math.log2(10)
    step = max(math.ceil((high - low) / 6), 1)  # six labels find room on a phone, not more
    exponents = [e for e in range(0, 71, step) if low <= e <= high]
    return {
        "tickvals": [2.0**e / one for e in exponents],
        "ticktext": [_round_bytes(e) for e in exponents],
    }


def _round_bytes(exponent: int) -> str:
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB")
    return f"{2 ** (exponent % 10)} {units[exponent // 10]}"


def _size_in_words(curve: HitRateCurve, blocks: int, result: SimulationResult) -> str:
    size = curve_bytes(curve, blocks, result)
    return f"{blocks:,} blocks" + ("" if size is None else f" ({show_bytes(size)})")


@dataclass(frozen=True)
class TimeAxis:
    """The time axis of all charts of a result: `end` is in `unit`, of `divisor` seconds each."""

    unit: str
    divisor: float
    end: float

    def layout(self) -> dict[str, Any]:
        """A fresh layout of the axis."""
        return {
            "range": [0, self.end or 1.0],
            "title": {"text": f"time ({self.unit})"},
            "tickformat": ",~g",
            "nticks": 7,
        }


def time_axis(result: SimulationResult) -> TimeAxis:
    """Seconds, minutes or hours, whichever reads best, up to the end of the longest scheme."""
    ends = [float(s.timeline.end_s[-1]) for s in result.schemes if len(s.timeline.end_s)]
    longest_s = max(ends, default=1.0)
    for limit_s, unit, divisor in ((300.0, "s", 1.0), (3 * 3600.0, "min", 60.0)):
        if longest_s <= limit_s:
            return TimeAxis(unit, divisor, longest_s / divisor)
    return TimeAxis("h", 3600.0, longest_s / 3600.0)


def describe_share(scheme: SchemeResult) -> str:
    """A bar in words, for those who do not see it."""
    parts = [
        f"{STYLES[kind].label.lower()} {100 * scheme.share[kind]:.1f} %"
        for kind in KINDS
        if scheme.share[kind] >= 0.0005
    ]
    return f"{scheme_name(scheme)}: {', '.join(parts)}"


def _capacity_bytes(result: SimulationResult) -> int | None:
    if result.bytes_per_token is None:
        return None
    return result.num_blocks * result.block_size * result.bytes_per_token


def _text_colour_on(kind: str) -> str:
    if kind == "free":
        return "--ink"
    return "#000000" if kind in DARK_TEXT_ON else "#ffffff"


def _plotly_text(text: str) -> str:
    """`text` so that plotly.js, which reads a few HTML tags in labels, shows it as it is."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _rounded(values: NDArray[Any], decimals: int) -> list[float | None]:
    """As a list, short in the file, and with null for what is not a number."""
    rounded: list[float] = np.round(values.astype(np.float64), decimals).tolist()
    return [value if math.isfinite(value) else None for value in rounded]
