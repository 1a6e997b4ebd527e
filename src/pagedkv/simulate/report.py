"""A simulation's result as one HTML file that works offline, for people to read and send on.

The same result gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape

from pagedkv.simulate.headline import (
    NO_PREFIX_IDS,
    curve_bytes,
    curve_rows,
    headlines,
    hit_rate_at,
    memory_size,
    paged_and_rival,
    show_bytes,
    show_seconds,
    traffic_size,
)
from pagedkv.simulate.metrics import (
    METRICS,
    Metric,
    applying,
    filled_share,
    metric_by_key,
    show_metric,
    show_number,
)
from pagedkv.simulate.palette import SHARED, STYLES
from pagedkv.simulate.report_figures import (
    Figure,
    describe_share,
    hit_rate_curve,
    memory_map,
    memory_over_time,
    requests_over_time,
    scheme_name,
    share_bars,
)
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
from pagedkv.simulate.results import (
    KINDS,
    HitRateCurve,
    SchemeResult,
    SimulationResult,
    count_within_bar,
)

REFUSED_SHOWN = 20


def report_html(result: SimulationResult) -> str:
    """The whole page."""
    figures: dict[str, Figure] = {}
    sections = (
        _share_section(result, figures),
        _time_section(result, figures),
        _map_section(result, figures),
        _requests_section(result, figures),
        _latency_section(result),
        _comparison_section(result),
        _curve_section(result, figures),
        _numbers_section(result),
        again_section(result.command, result.settings, _notes(result)),
        definitions_section(),
    )
    title = f"{result.trace_name}: where the KV memory goes"
    return page_html(title, _header(result, headlines(result)), sections, figures)


def _header(result: SimulationResult, sentences: tuple[str, ...]) -> str:
    meta = (
        f"<b>{escape(result.trace_name)}</b> ({escape(result.trace_format)}) · "
        f"{traffic_size(result)} · {escape(memory_size(result))}"
    )
    first, *others = sentences or ("No scheme was simulated.",)
    return (
        f'<header>\n<p class="eyebrow">{meta}</p>\n<h1>{prose(first)}</h1>\n'
        f'<p class="lead">{prose(" ".join(others))}</p>\n{_tiles(result)}</header>'
    )


def _tiles(result: SimulationResult) -> str:
    """The four numbers that tell the story, each against the contiguous rival."""
    paged, rival = paged_and_rival(result)
    if paged is None:
        return ""

    def tile(what: str, ours: str, theirs: str | None) -> str:
        against = "" if theirs is None or rival is None else f"{rival.scheme}: {theirs}"
        return (
            f'<li><div class="what">{escape(what)}</div><div class="number">{escape(ours)}</div>'
            f'<div class="against">{escape(against)}</div></li>'
        )

    def percent(share: float | None) -> str:
        return "–" if share is None else f"{100 * share:.1f} %"

    def both(show: Callable[[SchemeResult], str]) -> tuple[str, str | None]:
        return show(paged), None if rival is None else show(rival)

    tiles = (
        tile("requests held at once, mean", *both(lambda s: show_number(s.running_mean, 1))),
        tile(
            "of the memory that requests hold is full of tokens",
            *both(lambda s: percent(filled_share(s))),
        ),
        tile("output tokens a second", *both(lambda s: show_number(s.output_tokens_per_s, None))),
        tile("to the first token, median", *both(lambda s: show_seconds(s.ttft_s.p50))),
    )
    return f'<ul class="tiles">{"".join(tiles)}</ul>\n'


def _share_section(result: SimulationResult, figures: dict[str, Figure]) -> str:
    figures["share"] = share_bars(result)
    kinds = "".join(
        f"<div>{_swatch(kind)}<dt>{escape(STYLES[kind].label)}</dt>"
        f"<dd>{escape(metric_by_key(f'share.{kind}').definition)}</dd></div>"
        for kind in _kinds_present(result)
    )
    return section(
        "share",
        "Where the memory goes",
        "One bar is the whole KV memory under one way of handing it out, averaged over the time "
        "during which any request waits or runs. Dark blue does the work; green and grey can be "
        "had at any moment; the rest is kept from those who wait.",
        chart("share", "; ".join(describe_share(s) for s in result.schemes))
        + f'<dl class="kinds">{kinds}</dl>',
    )


def _time_section(result: SimulationResult, figures: dict[str, Figure]) -> str:
    charts = []
    for i, scheme in enumerate(result.schemes):
        figures[f"time-{i}"] = memory_over_time(scheme, result)
        charts.append(
            _captioned_chart(
                f"time-{i}",
                scheme,
                f"memory by kind over the {show_seconds(scheme.duration_s)} of the run. "
                + describe_share(scheme),
            )
        )
    return section(
        "time",
        "Memory over time",
        "The same kinds as time goes by, all schemes on one scale: a scheme that holds fewer "
        "requests takes longer for the same work.",
        _kind_legend(_kinds_present(result))
        + f'<div class="grid">{"".join(charts)}</div><p class="mouse">Drag over a chart to zoom '
        "in, here and below: all charts over time follow. A double click goes back.</p>",
    )


def _map_section(result: SimulationResult, figures: dict[str, Figure]) -> str:
    charts = []
    any_shared = False
    for i, scheme in enumerate(result.schemes):
        figures[f"map-{i}"] = memory_map(scheme, result)
        any_shared = any_shared or bool(scheme.memory_map.shared.any())
        charts.append(
            _captioned_chart(
                f"map-{i}",
                scheme,
                f"map of {result.num_blocks:,} physical blocks over time. "
                + describe_share(scheme),
            )
        )
    kinds = _kinds_present(result) + (["shared"] if any_shared else [])
    return section(
        "map",
        "The physical memory itself",
        "Each row is a stretch of neighbouring blocks, the first at the top; time runs to the "
        "right. A contiguous region is a solid band from arrival to finish; paged blocks lie "
        "wherever one was free.",
        _kind_legend(kinds) + f'<div class="grid">{"".join(charts)}</div>',
    )


def _requests_section(result: SimulationResult, figures: dict[str, Figure]) -> str:
    charts = []
    for which in ("running", "waiting"):
        figures[which] = requests_over_time(result, which)
        means = "; ".join(
            f"{scheme_name(s)}: mean {_mean(s, which)}, peak {_peak(s, which)}"
            for s in result.schemes
        )
        charts.append(
            f"<figure><h3>{which.capitalize()}</h3>"
            f"{chart(which, f'Requests {which} over time. {means}', link='time')}</figure>"
        )
    lines = "".join(
        f"<li>{line_sample(i)}{escape(scheme_name(scheme))}</li>"
        for i, scheme in enumerate(result.schemes)
    )
    return section(
        "requests",
        "Requests running and waiting",
        "What the memory allows. While others wait, more running at once is better; where nobody "
        "waits, fewer running only means that each is done sooner.",
        f'<ul class="legend">{lines}</ul><div class="grid">{"".join(charts)}</div>',
    )


def _latency_section(result: SimulationResult) -> str:
    metrics = [m for m in METRICS if m.key.startswith(("ttft_s.", "tpot_s."))]
    return section(
        "latency",
        "How long people wait",
        "Time to first token (TTFT) includes waiting for memory; time per output token (TPOT) is "
        "the pace after that. p90 means that nine of ten requests are at least as fast.",
        _metric_table(result.schemes, metrics, groups=False),
    )


def _curve_section(result: SimulationResult, figures: dict[str, Figure]) -> str:
    title = "How much memory a prefix cache is worth"
    curve = result.curve
    if curve is None:
        return section("curve", title, NO_PREFIX_IDS, "")
    figures["curve"] = hit_rate_curve(curve, result)
    rows = "".join(
        f"<tr{' class=here' if is_here else ''}><th scope=row>{escape(label)}</th>"
        f"<td>{show_number(100 * hit_rate_at(curve, blocks), 2)}</td><td>{blocks:,}</td>"
        f"{_size_cell(curve, blocks, result)}</tr>"
        for label, blocks, is_here in curve_rows(curve, result)
    )
    size_head = "" if result.bytes_per_token is None else "<th scope=col>memory</th>"
    table = (
        '<div class="scroll" tabindex="0" role="region" aria-label="Hit rate by memory size">'
        "<table><thead><tr><th scope=col>size</th><th scope=col>hit rate (%)</th>"
        f"<th scope=col>blocks</th>{size_head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
    return section(
        "curve",
        title,
        f"The share of prompt blocks that a cache of a given size finds again, exact for every "
        f"size, from one pass over the trace: {curve.accesses:,} accesses to {curve.distinct:,} "
        f"blocks of {curve.block_size} tokens. More memory than the last mark buys nothing: "
        f"{100 * curve.ceiling:.2f} % is the ceiling.",
        chart(
            "curve",
            "Hit rate over memory size. "
            + "; ".join(
                f"{label}: {blocks:,} blocks, {100 * hit_rate_at(curve, blocks):.2f} %"
                for label, blocks, _ in curve_rows(curve, result)
            ),
        )
        + table,
    )


def _comparison_section(result: SimulationResult) -> str:
    if not result.comparison:
        return ""
    heads = "".join(
        f"<th scope=col>{head}</th>"
        for head in ("figure", "system", "quantity", "paper", "here", "bar", "within")
    )
    rows = "".join(
        f"<tr><td>{escape(row.figure)}</td><td>{escape(row.system)}</td>"
        f"<td>{escape(row.quantity)}{unit_html(row.unit)}</td>"
        f"<td>{row.paper:,.2f}</td><td>{row.ours:,.2f}</td>"
        f"<td>{escape(row.bar_in_words)}</td><td>{row.verdict}</td></tr>"
        for row in result.comparison
    )
    return section(
        "comparison",
        "Beside the paper",
        count_within_bar(result.comparison),
        '<div class="scroll" tabindex="0" role="region" aria-label="Figures beside the paper">'
        f'<table class="full"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>',
    )


def _numbers_section(result: SimulationResult) -> str:
    return section(
        "numbers",
        "Every number",
        "Each name leads to its definition. --json FILE writes these and the charts' data.",
        _metric_table(result.schemes, applying(result.schemes), groups=True),
    )


def _notes(result: SimulationResult) -> list[str]:
    notes = [*result.remarks]
    for scheme in result.schemes:
        shown = scheme.refused[:REFUSED_SHOWN]
        notes += [f"{scheme_name(scheme)} refused: {line}" for line in shown]
        if len(scheme.refused) > len(shown):
            notes.append(
                f"{scheme_name(scheme)} refused {len(scheme.refused) - len(shown):,} more "
                "(--json has them all)."
            )
    return notes


def _metric_table(
    schemes: tuple[SchemeResult, ...], metrics: Iterable[Metric], *, groups: bool
) -> str:
    heads = "".join(
        f"<th scope=col{_us(s)}>{escape(s.scheme)}<small>{escape(s.placement or '')}</small></th>"
        for s in schemes
    )
    rows = []
    group = None
    for metric in metrics:
        if groups and metric.group != group:
            group = metric.group
            rows.append(
                f'<tr class="group"><th scope=rowgroup colspan="{len(schemes) + 1}">'
                f"{escape(group)}</th></tr>"
            )
        cells = "".join(f"<td{_us(s)}>{escape(show_metric(metric, s))}</td>" for s in schemes)
        rows.append(f"<tr><th scope=row>{term(metric)}</th>{cells}</tr>")
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Metrics by scheme">'
        f'<table class="full"><thead><tr><th scope=col></th>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _captioned_chart(name: str, scheme: SchemeResult, description: str) -> str:
    title = scheme_name(scheme)
    return (
        f"<figure><h3>{escape(title)}</h3>"
        f"{chart(name, f'{title}: {description}', link='time')}</figure>"
    )


def _kinds_present(result: SimulationResult) -> list[str]:
    """The kinds that any scheme ever shows, and free, which is there before anything comes."""
    return [
        kind
        for i, kind in enumerate(KINDS)
        if kind == "free"
        or any(s.share[kind] >= 0.0005 for s in result.schemes)
        or any((s.memory_map.kind == i).any() for s in result.schemes)
    ]


def _kind_legend(kinds: list[str]) -> str:
    items = "".join(f"<li>{_swatch(k)}{escape(_kind_label(k))}</li>" for k in kinds)
    return f'<ul class="legend">{items}</ul>'


def _kind_label(kind: str) -> str:
    return SHARED.label if kind == SHARED.key else STYLES[kind].label


def _swatch(kind: str) -> str:
    return f'<span class="swatch" style="background:var(--kind-{kind})" aria-hidden="true"></span>'


def _mean(scheme: SchemeResult, which: str) -> str:
    if which == "running":
        return show_number(scheme.running_mean, 1)
    timeline = scheme.timeline
    lengths = timeline.end_s - timeline.start_s
    total = float(lengths.sum())
    return show_number(float((timeline.waiting * lengths).sum()) / total if total else None, 1)


def _peak(scheme: SchemeResult, which: str) -> str:
    values = scheme.timeline.running if which == "running" else scheme.timeline.waiting
    return show_number(float(values.max()) if len(values) else None, 0)


def _size_cell(curve: HitRateCurve, blocks: int, result: SimulationResult) -> str:
    size = curve_bytes(curve, blocks, result)
    return "" if size is None else f"<td>{show_bytes(size)}</td>"


def _us(scheme: SchemeResult) -> str:
    return ' class="us"' if scheme.scheme == "paged" else ""
