"""A simulation's result in the terminal: sentences, bars, a table, the hit-rate curve.

Fits 80 columns, and says the same without colour and in a pipe. Everything that comes from a user
(trace names, remarks) is printed as text, never read as markup.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pagedkv.simulate.headline import (
    NO_PREFIX_IDS,
    curve_bytes,
    curve_rows,
    headlines,
    hit_rate_at,
    memory_size,
    show_bytes,
    traffic_size,
)
from pagedkv.simulate.metrics import (
    GROUP_NOTES,
    Metric,
    applying,
    definitions_by_group,
    label_with_unit,
    show_metric,
    show_number,
)
from pagedkv.simulate.palette import STYLES, KindStyle
from pagedkv.simulate.results import (
    KINDS,
    PaperFigure,
    SchemeResult,
    SimulationResult,
    count_within_bar,
)

REFUSED_SHOWN = 3

_VERDICTS = {"yes": "green", "NO": "bold red"}


def print_result(result: SimulationResult, console: Console) -> None:
    """Print everything a person wants to know of the result first."""
    print_text(
        console,
        Text.assemble(
            (writable(result.trace_name, console), "bold"),
            f" ({writable(result.trace_format, console)}): {traffic_size(result)}\n"
            f"memory: {memory_size(result)}",
        ),
    )
    console.print()
    for sentence in headlines(result):
        print_text(console, Text(sentence))
    console.print()
    _print_bars(result.schemes, console)
    for schemes in _fitting(result.schemes, console.width):
        console.print()
        console.print(_scheme_table(schemes, applying(result.schemes), console))
    console.print()
    _print_curve(result, console)
    _print_refused(result.schemes, console)
    for remark in result.remarks:
        print_text(console, Text(writable(f"Note: {remark}", console)))


def explain(console: Console) -> None:
    """Print the definition of every metric."""
    for group, definitions in definitions_by_group().items():
        print_text(console, Text(group, style="bold"))
        if group in GROUP_NOTES:
            print_text(console, Text(GROUP_NOTES[group]), indent=2)
        for definition in definitions:
            print_text(console, Text(label_with_unit(definition), style="cyan"), indent=2)
            print_text(console, Text(definition.definition), indent=6)
        console.print()


def print_paper_comparison(rows: Sequence[PaperFigure], console: Console) -> None:
    """Print a paper's figures beside ours, with the difference and whether it is within the bar."""
    table = plain_table()
    for heading in ("fig.", "system", "quantity"):
        table.add_column(heading)
    for heading in ("paper", "ours", "off by", "bar"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    previous = None
    for row in rows:
        place = (row.figure, row.system)
        percent = row.bar_kind == "percent"
        number = row.figure.removeprefix("figure ")
        table.add_row(
            Text(number if previous is None or previous[0] != row.figure else ""),
            Text(row.system if previous != place else ""),
            Text(f"{row.quantity} ({row.unit})" if row.unit else row.quantity),
            f"{row.paper:,.2f}",
            f"{row.ours:,.2f}",
            f"{row.difference:+,.1f}{' %' if percent else ''}",
            writable(row.bar_in_words, console),
            Text(row.verdict, style=_VERDICTS.get(row.verdict, "")),
        )
        previous = place
    console.print(table)
    print_text(console, Text(count_within_bar(rows)))


def plain_table(*, is_wide: bool = False) -> Table:
    """A table without a frame, as all are here; columns of a wide one stand closer."""
    padding = (0, 0, 0, 0) if is_wide else (0, 1, 0, 0)
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding)


def print_text(console: Console, text: Text, *, indent: int = 0) -> None:
    """Print in signs that the console has."""
    if console.options.ascii_only:
        text = text.copy()
        text.plain = writable(text.plain, console)
    console.print(Padding(text, (0, 0, 0, indent)) if indent else text)


def writable(text: str, console: Console) -> str:
    """`text` in signs that the terminal can write and that do nothing but stand there."""
    text = "".join(sign if sign.isprintable() or sign == "\n" else "\ufffd" for sign in text)
    if console.options.ascii_only:
        text = text.translate(ASCII_SIGNS).encode("ascii", errors="replace").decode("ascii")
    return text


ASCII_SIGNS = str.maketrans({"–": "-", "±": "+-"})


def _column_title(scheme: SchemeResult) -> str:
    return scheme.scheme if scheme.placement is None else f"{scheme.scheme}\n{scheme.placement}"


def _fitting(schemes: tuple[SchemeResult, ...], width: int) -> list[tuple[SchemeResult, ...]]:
    """The schemes in as few tables as the width allows: a cut-off number is worse than two."""
    metrics = applying(schemes)
    label = 2 + max(len(label_with_unit(metric)) for metric in metrics)
    tables: list[tuple[SchemeResult, ...]] = []
    room = 0
    for scheme in schemes:
        cells = [*_column_title(scheme).split("\n"), *(show_metric(m, scheme) for m in metrics)]
        column = 2 + max(len(cell) for cell in cells)
        if not tables or column > room:
            tables.append(())
            room = width + 1 - label  # the last column ends without a gap
        tables[-1] += (scheme,)
        room -= column
    return tables


def _scheme_table(
    schemes: tuple[SchemeResult, ...], metrics: list[Metric], console: Console
) -> Table:
    table = plain_table()
    table.add_column("", no_wrap=True)
    for scheme in schemes:
        table.add_column(Text(_column_title(scheme)), justify="right", no_wrap=True)
    group = None
    for metric in metrics:
        if metric.group != group:
            if group is not None:
                table.add_section()
            table.add_row(Text(metric.group, style="bold"))
            group = metric.group
        table.add_row(
            Text(f" {label_with_unit(metric)}"),
            *(Text(writable(show_metric(metric, scheme), console)) for scheme in schemes),
        )
    return table


def _print_bars(schemes: tuple[SchemeResult, ...], console: Console) -> None:
    """One bar a scheme: the whole KV memory, cut by kind."""
    name_width = max(len(scheme.scheme) for scheme in schemes)
    cells = min(console.width, 100) - name_width - 2
    for scheme in schemes:
        line = Text(f"{scheme.scheme:<{name_width}}  ", no_wrap=True)
        for kind, count in zip(KINDS, _whole_cells(scheme, cells), strict=True):
            line.append(_sign(STYLES[kind], console) * count, style=STYLES[kind].terminal)
        console.print(line)
    legend = Text()
    for style in (STYLES[kind] for kind in KINDS):
        if not any(scheme.share[style.key] >= 0.0005 for scheme in schemes):
            continue
        line_so_far = legend.plain.rsplit("\n", 1)[-1]
        if line_so_far and len(line_so_far) + 2 + len(style.label) > cells:
            legend.append("\n")  # between entries, so that a sign stays with its words
        legend.append(_sign(style, console), style=style.terminal)
        legend.append(f" {style.label}  ")
    legend.rstrip()
    console.print(Padding(legend, (0, 0, 0, name_width + 2)))


def _sign(style: KindStyle, console: Console) -> str:
    return style.ascii_sign if console.options.ascii_only else style.sign


def _whole_cells(scheme: SchemeResult, cells: int) -> list[int]:
    """`cells` cut by kind, largest remainders first, so that every bar is equally long."""
    exact = [max(scheme.share[kind], 0.0) * cells for kind in KINDS]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(KINDS)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: max(cells - sum(counts), 0)]:
        counts[i] += 1
    return counts


def _print_curve(result: SimulationResult, console: Console) -> None:
    curve = result.curve
    if curve is None:
        print_text(console, Text(NO_PREFIX_IDS))
        return
    print_text(
        console,
        Text.assemble(
            ("Exact LRU hit rate by memory size", "bold"),
            f": {curve.accesses:,} accesses to {curve.distinct:,} blocks of {curve.block_size} "
            f"tokens; at most {100 * curve.ceiling:.2f} % can hit",
        ),
    )
    table = plain_table()
    table.add_column("")
    table.add_column("hit rate (%)", justify="right", no_wrap=True)
    table.add_column("blocks", justify="right", no_wrap=True)
    if result.bytes_per_token is not None:
        table.add_column("memory", justify="right", no_wrap=True)
    for label, blocks, _ in curve_rows(curve, result):
        size = curve_bytes(curve, blocks, result)
        table.add_row(
            label,
            show_number(100 * hit_rate_at(curve, blocks), 2),
            f"{blocks:,}",
            *([] if size is None else [show_bytes(size)]),
        )
    console.print(table)


def _print_refused(schemes: tuple[SchemeResult, ...], console: Console) -> None:
    for scheme in schemes:
        if scheme.refused:
            print_text(
                console, Text(f"{scheme.scheme} refused {len(scheme.refused):,}:", style="bold")
            )
            for line in scheme.refused[:REFUSED_SHOWN]:
                print_text(console, Text(writable(line, console)), indent=2)
            if len(scheme.refused) > REFUSED_SHOWN:
                more = len(scheme.refused) - REFUSED_SHOWN
                print_text(console, Text(f"and {more:,} more (--json has them all)"), indent=2)
