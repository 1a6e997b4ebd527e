"""A what-if in the terminal: sentences, and a row for each choice of the varied settings."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedkv.simulate.headline import memory_size, traffic_size
from pagedkv.simulate.metrics import Metric, show_metric
from pagedkv.simulate.results import WhatIfResult
from pagedkv.simulate.table import plain_table, print_text, writable
from pagedkv.simulate.what_if import (
    MEASURED,
    base_in_words,
    columns_of,
    is_by_step,
    measured_of,
    sentences,
    shows_blocks,
)

BASE_SIGN = "*"
MEASURED_SIGN = "="

_WIDEST = 10_000

_DROPPED_FIRST = ("waste", "ttft_s.p50", "output_tokens_per_s")
"""Columns that go where the lines are too short for all; the report and the JSON have them."""

_HEADINGS = {
    "hit_rate_first": "hit rate\n(%)",
    "waste": "waste\n(%)",
    "preemptions": "preemp-\ntions",
    "ttft_s.p50": "TTFT\np50 (s)",
    "ttft_s.p99": "TTFT\np99 (s)",
    "output_tokens_per_s": "output\n(tok/s)",
}
"""Of the columns, in two short lines: ten of them fit 80 columns."""


def print_what_if(result: WhatIfResult, console: Console) -> None:
    """Print everything a person wants to know of the result first."""
    print_text(
        console,
        Text.assemble(
            (writable(result.trace_name, console), "bold"),
            f" ({writable(result.trace_format, console)}): {traffic_size(result)}\n"
            f"memory as it was: {memory_size(result)}",
        ),
    )
    console.print()
    for sentence in sentences(result):
        print_text(console, Text(sentence))
    console.print()
    columns = columns_of(result)
    table = _table(result, columns, console)
    left_out = []
    for metric in [m for key in _DROPPED_FIRST for m in columns if m.key == key]:
        if _width(table, console) <= console.width:
            break
        columns.remove(metric)
        left_out.append(_heading(result, metric).replace("-\n", "").replace("\n", " "))
        table = _table(result, columns, console)
    console.print(table)
    print_text(console, Text(f"{BASE_SIGN} {base_in_words(result)}"))
    if result.measured_ttft_s is not None:
        print_text(console, Text(f"{MEASURED_SIGN} {MEASURED}"))
    if left_out:
        print_text(console, Text(f"Not shown, for the width: {', '.join(left_out)}"))
    for remark in result.remarks:
        print_text(console, Text(writable(f"Note: {remark}", console)))


def _width(table: Table, console: Console) -> int:
    """Columns that the table needs where no value is broken."""
    unbounded = console.options.update(max_width=_WIDEST)
    return console.measure(table, options=unbounded).maximum


def _table(result: WhatIfResult, columns: list[Metric], console: Console) -> Table:
    any_refused = any(row.scheme.refused for row in result.rows)
    table = plain_table(is_wide=True)
    table.add_column("", no_wrap=True)
    for name in result.names:
        # What is too long is broken, so that the numbers keep their places.
        table.add_column(_broken(name), justify="right", overflow="fold")
    if shows_blocks(result):
        table.add_column("\nblocks", justify="right", no_wrap=True)
    if any_refused:
        table.add_column("re-\nfused", justify="right", no_wrap=True)
    for metric in columns:
        table.add_column(_heading(result, metric), justify="right", no_wrap=True)
    for row in result.rows:
        cells = [BASE_SIGN if row.is_base else "", *row.values]
        if shows_blocks(result):
            cells.append(f"{row.num_blocks:,}")
        if any_refused:
            cells.append(f"{len(row.scheme.refused):,}")
        cells += [show_metric(metric, row.scheme) for metric in columns]
        table.add_row(
            *(Text(writable(cell, console)) for cell in cells), style="bold" if row.is_base else ""
        )
        if row.is_base and result.measured_ttft_s is not None:
            blank = [""] * (len(cells) - 1 - len(columns))
            measured = (measured_of(result, metric) for metric in columns)
            table.add_row(MEASURED_SIGN, *blank, *measured)
    return table


def _heading(result: WhatIfResult, metric: Metric) -> str:
    heading = _HEADINGS[metric.key]
    if not is_by_step(result):
        return heading
    for seconds, steps in (
        ("TTFT\np50 (s)", "TTFT p50\n(steps)"),
        ("TTFT\np99 (s)", "TTFT p99\n(steps)"),
    ):
        heading = heading.replace(seconds, steps)
    return heading.replace("(tok/s)", "(tok/step)")


def _broken(name: str) -> str:
    """A name in two lines of about one length, broken at a hyphen."""
    places = [i + 1 for i, sign in enumerate(name) if sign == "-"]
    if not places:
        return f"\n{name}"
    middle = min(places, key=lambda place: abs(place - len(name) / 2))
    return f"{name[:middle]}\n{name[middle:]}"
