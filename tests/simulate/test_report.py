"""The report: one file, offline, right in a real browser."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from models.browser import CHROMIUM, Browser
from models.sample_results import nan_result, sample_result
from pagedkv.simulate.headline import NO_PREFIX_IDS, headlines
from pagedkv.simulate.metrics import METRICS, show_metric
from pagedkv.simulate.palette import SHARED, STYLES
from pagedkv.simulate.report import report_html
from pagedkv.simulate.report_figures import map_cells, memory_over_time, time_axis
from pagedkv.simulate.report_page import page_bytes
from pagedkv.simulate.results import KINDS, MemoryMap

RESULT = sample_result(num_requests=60)
EVIL = (
    "</title></script><script>window.taken=1</script><img src=x onerror='window.taken=1'><b>b</b>"
)
HTML = report_html(RESULT)


def _figures(html: str):
    return json.loads(re.search(r'id="figures">(.*?)</script>', html, re.S).group(1))


def _readable(html: str) -> str:
    """What is in the page besides scripts and styles, as text."""
    html = re.sub(r"<(script|style)\b.*?</\1>", "", html, flags=re.S)
    return unescape(" ".join(re.sub(r"<[^>]+>", "", html).split()))


# What is written


def test_the_headlines_are_the_first_thing_to_read() -> None:
    first, *others = headlines(RESULT)
    text = _readable(HTML)
    assert f"<h1>{first}</h1>" in re.sub(r"</?span[^>]*>", "", HTML)
    assert all(sentence in text for sentence in others)


def test_every_number_of_every_scheme_is_in_the_page_as_text() -> None:
    rows = {
        _readable(name): [_readable(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", cells)]
        for name, cells in re.findall(r"<tr><th scope=row>(.*?)</th>(.*?)</tr>", HTML)
    }
    for metric in METRICS:
        shown = [show_metric(metric, scheme) for scheme in RESULT.schemes]
        unit = f" ({metric.unit})" if metric.unit else ""
        assert rows[f"{metric.label}{unit}"] == shown


def test_every_link_leads_to_something_in_the_page() -> None:
    ids = re.findall(r'\bid="([^"]+)"', HTML)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', HTML)) <= set(ids)


def test_every_chart_is_described_in_words_and_has_a_figure() -> None:
    charts = re.findall(r'class="chart" id="([^"]+)" role="img" aria-label="([^"]+)"', HTML)
    assert {name for name, _ in charts} == set(_figures(HTML))
    assert all(len(description) > 40 for _, description in charts)


def test_the_command_and_every_setting_are_there_to_run_it_again() -> None:
    assert unescape(re.search(r'id="command">(.*?)</code>', HTML).group(1)) == RESULT.command
    text = _readable(HTML)
    assert all(name in text for name in RESULT.settings)
    told = _readable(report_html(replace(RESULT, settings={"requests": 2000, "seed": 12345})))
    assert "requests2,000" in told and "seed12345" in told  # as the first line counts them
    assert all(remark in text for remark in RESULT.remarks)


def test_a_trace_without_prefix_ids_says_so_and_has_no_curve() -> None:
    html = report_html(sample_result(num_requests=20, with_prefix_ids=False))
    assert NO_PREFIX_IDS in _readable(html)
    assert "curve" not in _figures(html)


def test_what_comes_from_the_user_is_shown_and_not_run() -> None:
    html = report_html(
        replace(
            RESULT,
            trace_name=EVIL,
            trace_format=EVIL,
            command=EVIL,
            settings={EVIL: EVIL},
            remarks=(EVIL,),
            schemes=(replace(RESULT.schemes[0], scheme=EVIL, placement=EVIL, refused=(EVIL,)),),
        )
    )
    assert "<script>window" not in html
    assert "<img" not in html
    assert EVIL in unescape(html)


def test_the_data_of_the_charts_cannot_end_their_script_element() -> None:
    raw = re.search(r'id="figures">(.*?)</script>', HTML, re.S).group(1)
    assert not set("<>&") & set(raw)
    assert "<extra>" in json.dumps(_figures(HTML))  # there was something to protect


def test_nothing_not_observed_is_shown_as_a_number() -> None:
    assert "nan" not in _readable(report_html(nan_result())).lower().split()


def test_the_same_result_gives_the_same_bytes() -> None:
    assert report_html(RESULT) == HTML


def test_the_page_forbids_requests_and_names_no_address_outside_itself() -> None:
    assert "default-src 'none'" in HTML
    assert "://" not in HTML  # plotly.js, which has many, is packed


def test_plotly_is_inside_whole() -> None:
    from plotly.offline import get_plotlyjs

    packed = re.search(r'id="plotly">(.*?)</script>', HTML, re.S).group(1)
    assert gzip.decompress(base64.b64decode(packed)).decode() == get_plotlyjs()


def test_importing_the_report_does_not_import_plotly() -> None:
    code = (
        "import sys, pagedkv.simulate.report as r; print([m for m in sys.modules if 'plotly' in m])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "NUMBA_DISABLE_JIT": "1"},
    )
    assert printed.stdout.strip() == "[]"


# What is drawn


def test_all_schemes_are_drawn_on_one_scale() -> None:
    figures = _figures(HTML)
    longest = max(scheme.timeline.end_s[-1] for scheme in RESULT.schemes)
    axis = time_axis(RESULT)
    for name in ("time", "map"):
        ranges = {
            tuple(figures[f"{name}-{i}"]["layout"]["xaxis"]["range"])
            for i in range(len(RESULT.schemes))
        }
        assert ranges == {(0, longest / axis.divisor)}
        heights = {
            tuple(figures[f"{name}-{i}"]["layout"]["yaxis"]["range"])
            for i in range(len(RESULT.schemes))
        }
        assert len(heights) == 1


def test_memory_over_time_stacks_up_to_the_whole() -> None:
    for scheme in RESULT.schemes:
        traces = memory_over_time(scheme, RESULT)["data"]
        total = sum(np.array(trace["y"]) for trace in traces)
        assert np.allclose(total, 100, atol=0.5)
        assert all(trace["stackgroup"] == "memory" for trace in traces)
        assert all(len(trace["x"]) == len(scheme.timeline.end_s) + 1 for trace in traces)


def test_a_kind_has_its_own_colour_in_every_chart() -> None:
    figures = _figures(HTML)
    by_label = {STYLES[kind].label: f"--kind-{kind}" for kind in KINDS}
    for trace in figures["share"]["data"]:
        assert trace["marker"]["color"] == by_label[trace["name"]]
    for trace in figures["time-1"]["data"]:
        assert trace["fillcolor"] == by_label[trace["name"]]
    scale = figures["map-0"]["data"][0]["colorscale"]
    assert [colour for _, colour in scale[::2]] == [*by_label.values(), "--kind-shared"]


def test_the_map_marks_shared_only_where_token_states_are() -> None:
    tokens, free = KINDS.index("token_states"), KINDS.index("free")
    recorded = MemoryMap(
        time_s=np.array([0.0, 1.0]),
        kind=np.array([[tokens, tokens], [free, free]], dtype=np.uint8),
        shared=np.array([[0, 1], [0, 1]], dtype=np.uint8),
        slots_per_row=16.0,
    )
    assert map_cells(recorded).tolist() == [[tokens, len(KINDS)], [free, free]]


def test_the_curve_marks_each_share_of_the_ceiling_and_this_memory() -> None:
    assert RESULT.curve is not None
    traces = {trace["name"]: trace for trace in _figures(HTML)["curve"]["data"]}
    assert traces["share of the ceiling"]["x"] == list(RESULT.curve.smallest.values())
    assert traces["the memory simulated here"]["x"] == [RESULT.num_blocks]
    layout = _figures(HTML)["curve"]["layout"]
    assert layout["xaxis"]["type"] == "log"
    first = layout["xaxis2"]
    gib = first["tickvals"][first["ticktext"].index("64 GiB")]
    assert gib == pytest.approx(64 * 2**30 / (16 * 819_200))


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("block", [0, 1], ids=["light", "dark"])
def test_text_and_lines_stand_out_from_their_ground(block: int) -> None:
    sheet = re.search(r"<style>(.*?)</style>", HTML, re.S).group(1)
    blocks = sheet.split(":root")[1:]  # light and dark take turns
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-fA-F]{6});", "".join(blocks[block::2])))
    for ground in ("card", "page"):
        for text in ("ink", "muted", "link", "here"):
            assert _contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for line in ("accent", "scheme-0", "scheme-1", "scheme-2", "scheme-3"):
        assert _contrast(colours[line], colours["card"]) >= 3, line
    assert colours[f"kind-{SHARED.key}"] == SHARED.light
    lines = [colours[f"scheme-{i}"] for i in range(4)]
    for one, other in itertools.combinations(lines, 2):
        assert _contrast(one, other) >= 1.4, (one, other)  # told apart by lightness alone
    assert _contrast(lines[2], lines[3]) >= 2  # of reserve-pow2 and -exact, which lie close


# In a real browser

pytest_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_bytes(page_bytes(report_html(RESULT)))
    return path


@pytest.fixture
def laptop(browser: Browser, page: Path) -> Browser:
    """The report at laptop width; opened once for the tests that only look and click."""
    if browser.evaluate("location.href").split("#")[0] != page.as_uri():
        browser.open(page, width=1280, height=900, dark=False)
    return browser


def _outside(browser: Browser, page: Path) -> list[str]:
    inside = (page.as_uri(), "data:", "blob:")
    return [address for address in browser.requests if not address.startswith(inside)]


@pytest_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390], ids=["laptop", "phone"])
def test_all_charts_are_drawn_without_an_error_or_a_request(
    browser: Browser, page: Path, width: int, dark: bool
) -> None:
    browser.open(page, width=width, height=900, dark=dark, touch=width < 500)
    assert browser.errors == []
    assert _outside(browser, page) == []
    assert browser.evaluate("document.documentElement.dataset.charts") == "drawn"
    drawn = browser.evaluate(
        "[...document.querySelectorAll('.chart')].filter(c => c.querySelector('.main-svg')).length"
    )
    assert drawn == len(_figures(HTML))
    # every colour has found its value
    unresolved = 'JSON.stringify([c.data.map(t => ({...t, z: 0, text: 0})), c.layout]).match(/"--/)'
    assert not browser.evaluate(f"[...document.querySelectorAll('.chart')].some(c => {unresolved})")
    # nothing sticks out to the right
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    too_wide = browser.evaluate(
        "[...document.querySelectorAll('.chart .main-svg')].filter("
        "s => s.getBoundingClientRect().right > innerWidth).length"
    )
    assert too_wide == 0


@pytest_browser
@pytest.mark.parametrize(
    "result",
    [
        nan_result(),
        sample_result(
            num_requests=20, with_prefix_ids=False, bytes_per_token=None, schemes=("paged",)
        ),
        sample_result(num_requests=20, schemes=("reserve-exact", "reserve-max")),
    ],
    ids=["nothing observed", "paged alone without prefix ids", "no paged"],
)
def test_results_that_lack_something_are_drawn_too(
    browser: Browser, tmp_path: Path, result
) -> None:
    path = tmp_path / "report.html"
    path.write_bytes(page_bytes(report_html(result)))
    browser.open(path, width=1280, height=900, dark=False)
    assert browser.errors == []
    assert browser.evaluate("document.documentElement.dataset.charts") == "drawn"


@pytest_browser
def test_a_hostile_name_runs_nothing(browser: Browser, tmp_path: Path) -> None:
    paged = replace(RESULT.schemes[0], scheme=EVIL, placement=EVIL, refused=(EVIL,))
    hostile = replace(
        RESULT,
        trace_name=EVIL,
        command=EVIL,
        settings={EVIL: EVIL},
        remarks=(EVIL,),
        schemes=(paged, *RESULT.schemes[1:]),
    )
    path = tmp_path / "report.html"
    path.write_bytes(page_bytes(report_html(hostile)))
    browser.open(path, width=1280, height=900, dark=False)
    assert browser.errors == []
    assert browser.evaluate("window.taken") is None
    assert browser.evaluate("document.querySelector('.eyebrow b').textContent") == EVIL
    # plotly.js reads a few tags in labels; a name is shown as it is
    assert "<b>b</b>" in browser.evaluate(
        "document.querySelector('#share .yaxislayer-above').textContent"
    )


@pytest_browser
@pytest.mark.parametrize("width", [1440, 390, 300])
def test_a_table_wider_than_its_place_says_that_there_is_more(
    browser: Browser, page: Path, width: int
) -> None:
    browser.open(page, width=width, height=900, dark=False, touch=width < 500)
    told = "[...document.querySelectorAll('.scroll')].map(s => !s.previousElementSibling.hidden)"
    wide = "[...document.querySelectorAll('.scroll')].map(s => s.scrollWidth > s.clientWidth)"
    assert browser.evaluate(told) == browser.evaluate(wide)
    if width != 390:
        assert any(browser.evaluate(wide)) == (width == 300)
    if width == 300:
        browser.send(
            "Emulation.setDeviceMetricsOverride",
            width=1440, height=900, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        browser.wait_for(f"!{told}.some(Boolean)")


@pytest_browser
def test_the_charts_follow_a_change_between_light_and_dark(laptop: Browser) -> None:
    ground = "getComputedStyle(document.querySelector('#share .main-svg')).backgroundColor"
    light = laptop.evaluate(ground)
    laptop.set_dark(True)
    laptop.wait_for(f"{ground} !== {json.dumps(light)}")
    assert laptop.evaluate(ground) == "rgb(25, 31, 39)"  # --card in the dark
    laptop.set_dark(False)
    laptop.wait_for(f"{ground} === {json.dumps(light)}")
    assert laptop.errors == []


@pytest_browser
def test_charts_over_the_same_time_zoom_together(laptop: Browser) -> None:
    laptop.evaluate(
        "Plotly.relayout('time-0', {'xaxis.range[0]': 10, 'xaxis.range[1]': 20}).then(() => 0)"
    )
    for other in ("time-3", "map-1", "waiting"):
        laptop.wait_for(f"document.getElementById('{other}').layout.xaxis.range[0] === 10")
        assert laptop.evaluate(f"document.getElementById('{other}').layout.xaxis.range") == [
            10,
            20,
        ]
    assert laptop.errors == []


@pytest_browser
def test_no_button_sends_a_chart_anywhere(laptop: Browser) -> None:
    laptop.evaluate(
        "(() => { const c = document.getElementById('time-0');"
        " return Plotly.react(c, c.data, c.layout, {...c._context, displayModeBar: true})"
        ".then(() => 0); })()"
    )
    buttons = laptop.evaluate(
        "[...document.querySelectorAll('#time-0 .modebar-btn')].map(b => b.dataset.title)"
    )
    assert buttons == ["Zoom", "Pan", "Reset axes", "Download plot as a PNG"]
    assert laptop.evaluate("document.getElementById('time-0')._context.plotlyServerURL") == ""


@pytest_browser
def test_the_map_shows_the_kind_of_each_cell(laptop: Browser) -> None:
    cells = map_cells(RESULT.schemes[0].memory_map)
    row, column = cells.shape[0] // 2, cells.shape[1] // 3
    trace = "document.getElementById('map-0').data[0]"
    assert laptop.evaluate(f"{trace}.z.length") == cells.shape[0]
    assert laptop.evaluate(f"{trace}.z[{row}][{column}]") == cells[row, column]
    labels = [style.label for style in (*STYLES.values(), SHARED)]
    assert laptop.evaluate(f"{trace}.text[{row}][{column}]") == labels[cells[row, column]]


def test_the_papers_figures_stand_beside_ours_only_where_there_are_any() -> None:
    page = report_html(RESULT)
    assert (
        "Beside the paper" in page and "2 of 3 figures within the bar, and 1 fitted ones." in page
    )
    assert "<td>28.40</td><td>± 8</td><td>yes</td>" in page
    assert "<td>min 96</td><td>NO</td>" in page
    assert "Beside the paper" not in report_html(replace(RESULT, comparison=()))
