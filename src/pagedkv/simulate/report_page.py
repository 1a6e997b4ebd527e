"""The frame of a page for the browser that is one file and works offline.

Everything is in the file, plotly.js included (gzip inside base64, which makes 2 MB of its 4.8;
the page unpacks it). A content security policy in the page forbids every request, so that none
can slip in.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import TypeAlias

from pagedkv.simulate.metrics import (
    GROUP_NOTES,
    Definition,
    definitions_by_group,
    unit_in_steps,
)
from pagedkv.simulate.palette import base_stylesheet
from pagedkv.simulate.report_figures import DASHES, Figure, scheme_colour

_SVG_DASHES = {"solid": "", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3"}

Setting: TypeAlias = str | int | float | bool | None


def page_html(
    title: str, header: str, sections: tuple[str, ...], figures: dict[str, Figure]
) -> str:
    """The whole page; `figures` are drawn into the charts of their names."""
    body = "\n".join(
        (
            header,
            "<main>",
            *sections,
            "</main>",
            "<footer><p>Made by pagedkv. This page is complete in itself: it loads nothing and "
            "sends nothing.</p></footer>",
        )
    )
    return (
        "<!DOCTYPE html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:\">\n"
        f"<title>{escape(title)}</title>\n"
        f"<style>\n{_stylesheet()}</style>\n</head>\n<body>\n{body}\n"
        f'<script type="application/json" id="figures">{_json_in_html(figures)}</script>\n'
        f'<script type="text/plain" id="plotly">{_packed_plotly()}</script>\n'
        f"<script>\n{_asset('report.js')}</script>\n</body>\n</html>\n"
    )


def page_bytes(page: str) -> bytes:
    """The page as what a file of it holds: UTF-8, odd file names on Linux included."""
    return page.encode("utf-8", errors="replace")


def section(name: str, title: str, text: str, content: str) -> str:
    """A part of the page with its heading, a paragraph, and what it shows."""
    return (
        f'<section id="s-{name}" aria-labelledby="h-{name}"><h2 id="h-{name}">{escape(title)}'
        f"</h2>\n<p>{prose(text)}</p>\n{content}</section>"
    )


def chart(name: str, description: str, *, link: str = "") -> str:
    """The place of a chart; charts with the same `link` zoom together."""
    linked = f' data-link="{link}"' if link else ""
    return (
        f'<div class="chart" id="{name}" role="img" aria-label="{escape(description)}"{linked}>'
        "</div>"
    )


def line_sample(index: int) -> str:
    """What the `index`-th line of a chart looks like, for a legend."""
    dashes = _SVG_DASHES.get(DASHES[index % len(DASHES)], "10 4")
    return (
        '<svg width="30" height="8" aria-hidden="true"><line x1="0" y1="4" x2="30" y2="4" '
        f'stroke="var({scheme_colour(index)})" stroke-width="2.5" stroke-dasharray="{dashes}"/>'
        "</svg>"
    )


def prose(text: str) -> str:
    """Escaped, with flags and the names of schemes kept from breaking at their hyphens."""
    return re.sub(r"--[a-z][a-z-]*|reserve-\w+", r'<span class="nowrap">\g<0></span>', escape(text))


def term(definition: Definition, *, unit: str | None = None) -> str:
    """The name of a number with its unit, or the one given, as a link to its definition."""
    return (
        f'<a class="term{_short(definition.label)}" href="#{_anchor(definition.definition)}" '
        f'title="{escape(definition.definition)}">{escape(definition.label)}</a>'
        f"{unit_html(definition.unit if unit is None else unit)}"
    )


def definitions_section(*, in_steps: bool = False) -> str:
    """What each number means; `in_steps`: where time is counted in the steps of a run."""
    parts = []
    for group, definitions in definitions_by_group().items():
        note = f"<p>{escape(GROUP_NOTES[group])}</p>" if group in GROUP_NOTES else ""
        entries = "".join(
            f'<div><dt id="{_anchor(d.definition)}">{escape(d.label)}'
            f"{unit_html(unit_in_steps(d.unit) if in_steps else d.unit)}</dt>"
            f"<dd>{escape(d.definition)}</dd></div>"
            for d in definitions
        )
        parts.append(f"<h3>{escape(group)}</h3>{note}<dl>{entries}</dl>")
    return section(
        "definitions",
        "What each number means",
        "Tools in this field use the same words for different numbers; these are the meanings "
        "here."
        + (" Time is counted in steps of the recorded run, each as long as any." * in_steps),
        f'<div class="definitions">{"".join(parts)}</div>',
    )


def again_section(command: str, settings: Mapping[str, Setting], notes: Sequence[str]) -> str:
    """How to make the page again: the command, what is to be known, every setting."""
    rows = "".join(
        f"<tr><th scope=row>{escape(name)}</th><td>{escape(_setting(name, value))}</td></tr>"
        for name, value in settings.items()
    )
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return section(
        "again",
        "Run it again",
        "The same command on the same trace gives the same numbers.",
        '<div class="command"><pre><code id="command">'
        f'{escape(command)}</code></pre><button id="copy" type="button" hidden>Copy'
        "</button></div>"
        + (f'<h3>Notes</h3><ul class="notes">{listed}</ul>' if notes else "")
        + f'<h3>Settings</h3><table class="plain"><tbody>{rows}</tbody></table>',
    )


def _short(label: str) -> str:
    return " nowrap" if len(label) <= 12 else ""


def unit_html(unit: str) -> str:
    """The unit in brackets, to stand behind a name; nothing for none."""
    return f' <span class="unit">({escape(unit)})</span>' if unit else ""


def _anchor(definition: str) -> str:
    """One anchor for each definition, so that the percentiles of a quantity share theirs."""
    first = next(
        d for ds in definitions_by_group().values() for d in ds if d.definition == definition
    )
    return "def-" + first.key.split(",")[0].replace(".", "-")


def _setting(name: str, value: Setting) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name != "seed":  # a seed counts nothing
        return f"{value:,}"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}"
    return str(value)


def _stylesheet() -> str:
    return base_stylesheet("kind-") + _asset("report.css")


def _asset(name: str) -> str:
    return (resources.files("pagedkv.simulate") / "report_assets" / name).read_text("utf-8")


def _packed_plotly() -> str:
    from plotly.offline import get_plotlyjs  # here, since the command must start without plotly

    # mtime=0: the same result gives the same bytes
    packed = gzip.compress(get_plotlyjs().encode("utf-8"), compresslevel=6, mtime=0)
    return base64.b64encode(packed).decode("ascii")


def _json_in_html(value: object) -> str:
    """JSON that cannot end the script element that it stands in."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
