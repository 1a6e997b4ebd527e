"""A what-if as one HTML file that works offline: a table, and a chart for each number.

The same result gives the same bytes.
"""

from __future__ import annotations

from html import escape
from typing import Any

from pagedkv.simulate.headline import memory_size, traffic_size
from pagedkv.simulate.metrics import Metric, show_metric
from pagedkv.simulate.report_figures import DASHES, Figure, scheme_colour
from pagedkv.simulate.report_page import (
    again_section,
    chart,
    definitions_section,
    line_sample,
    page_html,
    prose,
    section,
    term,
    unit_html,
)
from pagedkv.simulate.results import WhatIfResult, WhatIfRow
from pagedkv.simulate.what_if import (
    CHARTED,
    MEASURED,
    base_in_words,
    columns_of,
    in_words,
    is_by_step,
    measured_of,
    measured_value,
    sentences,
    shows_blocks,
    unit_of,
)

MOST_LINES = 6
"""Lines that a chart has at most; more than these nobody can tell apart."""

REFUSED_SHOWN = 3


def what_if_html(result: WhatIfResult) -> str:
    """The whole page."""
    figures: dict[str, Figure] = {}
    sections = (
        _charts_section(result, figures),
        _table_section(result),
        again_section(result.command, result.settings, _notes(result)),
        definitions_section(in_steps=is_by_step(result)),
    )
    title = f"{result.trace_name}: what if"
    return page_html(title, _header(result), sections, figures)


def _header(result: WhatIfResult) -> str:
    meta = (
        f"<b>{escape(result.trace_name)}</b> ({escape(result.trace_format)}) · "
        f"{traffic_size(result)} · as it was: {escape(memory_size(result))}"
    )
    first, *others = sentences(result)
    return (
        f'<header>\n<p class="eyebrow">{meta}</p>\n'
        f"<h1>What if {_listed(result.names)} had been different?</h1>\n"
        f'<p class="lead">{prose(" ".join([first, *others]))}</p>\n</header>'
    )


def _charts_section(result: WhatIfResult, figures: dict[str, Figure]) -> str:
    across = _across(result)
    lines = _lines(result, across)
    drawn = lines[:MOST_LINES]
    charts = []
    for metric in CHARTED:
        if all(metric.read(row.scheme) is None for row in result.rows):
            continue
        name = metric.key.replace(".", "-").replace("_", "-")
        figures[name] = _figure(result, metric, across, drawn)
        described = "; ".join(
            f"{in_words(result, row)}: {show_metric(metric, row.scheme)}" for row in result.rows
        )
        charts.append(
            f"<figure><h3>{escape(metric.label)}{unit_html(unit_of(result, metric))}</h3>"
            f"{chart(name, f'{metric.label}: {described}')}</figure>"
        )
    left_out = "" if len(drawn) == len(lines) else f" The first {len(drawn)} of {len(lines)} lines."
    return _charts(result, across, drawn, charts, left_out)


def _charts(
    result: WhatIfResult,
    across: int,
    drawn: list[tuple[str, list[WhatIfRow]]],
    charts: list[str],
    left_out: str,
) -> str:
    legend = ""
    if len(drawn) > 1:
        legend = (
            '<ul class="legend">'
            + "".join(
                f"<li>{line_sample(i)}{escape(label)}</li>" for i, (label, _) in enumerate(drawn)
            )
            + "</ul>"
        )
    hollow = "" if result.measured_ttft_s is None else f", the hollow one what was {MEASURED}"
    return section(
        "charts",
        f"By {result.names[across]}",
        "Each point is the whole trace once more. The diamond is the trace "
        f"{base_in_words(result)}{hollow}.{left_out}",
        f'{legend}<div class="grid">{"".join(charts)}</div>',
    )


def _figure(
    result: WhatIfResult, metric: Metric, across: int, lines: list[tuple[str, list[WhatIfRow]]]
) -> Figure:
    data: list[dict[str, Any]] = []
    for i, (label, rows) in enumerate(lines):
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": label,
                "x": [row.values[across] for row in rows],
                "y": [_shown(metric, row) for row in rows],
                "line": {
                    "color": scheme_colour(i),
                    "width": 2.25,
                    "dash": DASHES[i % len(DASHES)],
                },
                "marker": {"size": 6, "color": scheme_colour(i), "opacity": 1},
                "hovertemplate": "%{x}: %{y:,.4~g}",
            }
        )
    data.append(  # last, so that no line lies over it
        {
            "type": "scatter",
            "mode": "markers",
            "name": base_in_words(result),
            "x": [result.base.values[across]],
            "y": [_shown(metric, result.base)],
            "marker": {"size": 12, "symbol": "diamond", "color": "--here"},
            "cliponaxis": False,  # whole at 0, too
            "hovertemplate": "%{x}: %{y:,.4~g}",
        }
    )
    if (waited_s := measured_value(result, metric)) is not None:
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": MEASURED,
                "x": [result.base.values[across]],
                "y": [round(waited_s * metric.scale, 5)],
                "marker": {
                    "size": 12,
                    "symbol": "diamond-open",
                    "color": "--here",
                    "line": {"width": 2},
                },
                "cliponaxis": False,
                "hovertemplate": f"{MEASURED}: %{{y:,.4~g}}",
            }
        )
    layout = {
        "hovermode": "closest",
        "xaxis": {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": _places(result, across),
            "title": {"text": result.names[across]},
            "fixedrange": True,
        },
        "yaxis": {"rangemode": "tozero", "tickformat": ",~g", "fixedrange": True, "nticks": 6},
        "margin": {"l": 56, "r": 14, "t": 10, "b": 46},
        "height": 270,
    }
    return {"data": data, "layout": layout}


def _shown(metric: Metric, row: WhatIfRow) -> float | None:
    value = metric.read(row.scheme)
    return None if value is None else round(value * metric.scale, 5)


def _across(result: WhatIfResult) -> int:
    """The setting along the axis: the one with the most values, the first of several."""
    counts = [len(_places(result, i)) for i in range(len(result.names))]
    return counts.index(max(counts))


def _places(result: WhatIfResult, across: int) -> list[str]:
    """The values along the axis, in the order of the rows; the base's own, if any, comes first."""
    return list(dict.fromkeys(row.values[across] for row in result.rows))


def _lines(result: WhatIfResult, across: int) -> list[tuple[str, list[WhatIfRow]]]:
    """The rows of each choice of the other settings, with that choice in words."""
    lines: dict[tuple[str, ...], list[WhatIfRow]] = {}
    for row in result.rows:
        others = tuple(value for i, value in enumerate(row.values) if i != across)
        lines.setdefault(others, []).append(row)
    names = [name for i, name in enumerate(result.names) if i != across]
    return [
        (", ".join(f"{name} {value}" for name, value in zip(names, others)), rows)
        for others, rows in lines.items()
    ]


def _table_section(result: WhatIfResult) -> str:
    columns = columns_of(result)
    any_refused = any(row.scheme.refused for row in result.rows)
    heads = "".join(f"<th scope=col>{escape(name)}</th>" for name in result.names)
    if shows_blocks(result):
        heads += "<th scope=col>blocks</th>"
    heads += "".join(
        f"<th scope=col>{term(metric, unit=unit_of(result, metric))}</th>" for metric in columns
    )
    if any_refused:
        heads += "<th scope=col>refused</th>"
    rows = []
    for row in result.rows:
        cells = [*row.values]
        if shows_blocks(result):
            cells.append(f"{row.num_blocks:,}")
        cells += [show_metric(metric, row.scheme) for metric in columns]
        if any_refused:
            cells.append(f"{len(row.scheme.refused):,}")
        marked = ' class="us"' if row.is_base else ""
        sign = _sign("◆", base_in_words(result)) if row.is_base else ""
        rows.append(
            f"<tr><th scope=row{marked}>{sign}</th>"
            + "".join(f"<td{marked}>{escape(cell)}</td>" for cell in cells)
            + "</tr>"
        )
        if row.is_base and result.measured_ttft_s is not None:
            blank = [""] * (len(cells) - len(columns) - any_refused)
            measured = [*blank, *(measured_of(result, metric) for metric in columns)]
            measured += [""] * any_refused
            rows.append(
                f"<tr><th scope=row>{_sign('◇', MEASURED)}</th>"
                + "".join(f"<td>{escape(cell)}</td>" for cell in measured)
                + "</tr>"
            )
    below = "" if result.measured_ttft_s is None else f", the hollow one what was {MEASURED}"
    return section(
        "numbers",
        "Every choice",
        f"The diamond is the trace {base_in_words(result)}{below}. --json FILE has every metric "
        "of every row.",
        '<div class="scroll" tabindex="0" role="region" aria-label="Metrics by choice">'
        f'<table class="full"><thead><tr><th scope=col></th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>",
    )


def _sign(sign: str, words: str) -> str:
    """The mark of a row, as in the charts, and in words for those who do not see it."""
    return f'<span class="sign" aria-hidden="true">{sign}</span><span class="unseen">{words}</span>'


def _notes(result: WhatIfResult) -> list[str]:
    notes = [*result.remarks]
    for row in result.rows:
        refused = row.scheme.refused
        notes += [f"{in_words(result, row)} refused: {line}" for line in refused[:REFUSED_SHOWN]]
        if len(refused) > REFUSED_SHOWN:
            notes.append(
                f"{in_words(result, row)} refused {len(refused) - REFUSED_SHOWN:,} more "
                "(--json has them all)."
            )
    return notes


def _listed(names: tuple[str, ...]) -> str:
    whole = [f'<span class="nowrap">{escape(name)}</span>' for name in names]
    if len(whole) == 1:
        return whole[0]
    return f"{', '.join(whole[:-1])} and {whole[-1]}"
