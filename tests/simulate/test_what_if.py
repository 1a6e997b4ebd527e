"""Settings compared: the sentences, and the page in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from models.browser import CHROMIUM, Browser
from models.sample_results import sample_result
from pagedkv.simulate.metrics import METRICS, WASTE, show_metric
from pagedkv.simulate.report_page import page_bytes, prose
from pagedkv.simulate.results import Percentiles, WhatIfResult, WhatIfRow
from pagedkv.simulate.what_if import COLUMNS, columns_of, sentences
from pagedkv.simulate.what_if_report import MOST_LINES, what_if_html

PAGED = sample_result(num_requests=20, schemes=("paged",)).schemes[0]
EVIL = "</title></script><script>window.taken=1</script><img src=x onerror='window.taken=1'>"


def made(*rows: WhatIfRow, names: tuple[str, ...] = ("num-blocks", "block-size")) -> WhatIfResult:
    return WhatIfResult(
        command="pagedkv simulate run.jsonl --what-if num-blocks=1x,2x",
        settings={"num-blocks": 100, "block-size": 16},
        trace_name="run.jsonl",
        trace_format="recorded",
        num_requests=20,
        num_answers=20,
        prompt_tokens=1_000,
        output_tokens=100,
        num_blocks=100,
        block_size=16,
        bytes_per_token=None,
        names=names,
        rows=rows,
        remarks=("a remark",),
    )


def row(blocks: int, size: int, *, is_base: bool = False, **changes: object) -> WhatIfRow:
    scheme = replace(PAGED, **{"refused": (), **changes})  # type: ignore[arg-type]
    return WhatIfRow((f"{blocks}", f"{size}"), blocks, size, scheme, is_base)


RESULT = made(
    row(50, 16, hit_rate_first=0.1, preemptions=7),
    row(50, 32, hit_rate_first=0.2, preemptions=5),
    row(100, 16, hit_rate_first=0.3, preemptions=2, is_base=True),
    row(100, 32, hit_rate_first=0.5, preemptions=0),
    row(300, 16, hit_rate_first=0.5, preemptions=0),
)
HTML = what_if_html(RESULT)


def figures(html: str):
    return json.loads(re.search(r'id="figures">(.*?)</script>', html, re.S).group(1))


def readable(html: str) -> str:
    html = re.sub(r"<(script|style)\b.*?</\1>", "", html, flags=re.S)
    return unescape(" ".join(re.sub(r"<[^>]+>", "", html).split()))


def test_the_sentences_tell_how_it_was_what_is_best_and_how_little_does() -> None:
    first, best, fastest, least = sentences(RESULT)
    assert first.startswith(
        "Simulated at its own settings (num-blocks 100, block-size 16): 30.00 % of the prompt"
    )
    assert best == (
        "The highest hit rate, 50.00 %, comes with num-blocks 100, block-size 32; num-blocks 300, "
        "block-size 16."
    )
    assert fastest.endswith("s, comes with every choice.")  # all wait as long
    assert least == (
        "The least memory tried without a preemption is 100 blocks of 32 tokens (num-blocks 100, "
        "block-size 32)."
    )


def best_hit_rate(*rows: WhatIfRow) -> str:
    [told] = [line for line in sentences(made(*rows)) if line.startswith("The highest hit rate")]
    return told.removeprefix("The highest hit rate, ").removesuffix(".")


def test_what_is_equal_as_printed_is_told_as_equal() -> None:
    base = row(1, 16, hit_rate_first=0.1, is_base=True)
    low = row(2, 16, hit_rate_first=0.31)
    near = [row(4, size, hit_rate_first=0.4 + size / 1e7) for size in (8, 16, 64)]
    assert best_hit_rate(base, *near[:1]) == "40.00 %, comes with num-blocks 4, block-size 8"
    assert best_hit_rate(base, low, *near[1:]) == (
        "40.00 %, comes with num-blocks 4, block-size 16 or 64"
    )
    assert best_hit_rate(base, low, *near) == (
        "40.00 %, comes with num-blocks 4, block-size 8, 16 or 64"
    )
    as_good = row(1, 16, hit_rate_first=0.4, is_base=True)
    assert best_hit_rate(low, near[0], as_good) == (
        "40.00 %, comes simulated at its own settings and with num-blocks 4, block-size 8"
    )
    more = [row(n, n, hit_rate_first=0.4) for n in range(1, 6)]
    assert best_hit_rate(base, *more) == (
        "40.00 %, comes with num-blocks 1, block-size 1; num-blocks 2, block-size 2; "
        "num-blocks 3, block-size 3; 2 more"
    )
    assert best_hit_rate(as_good, *more) != best_hit_rate(base, *more)
    assert best_hit_rate(as_good, near[0]) == "40.00 %, comes with every choice"


def test_sentences_tell_times_in_the_unit_of_the_table() -> None:
    slow = Percentiles(1_841.2, 3_000.0, 3_741.4)
    told = sentences(replace(made(row(9, 16, is_base=True, ttft_s=slow)), measured_ttft_s=slow))
    both = "first tokens after 1,841 s (p50) and 3,741 s (p99)."
    assert told[0].endswith(both) and told[1] == f"Measured in that run: {both}"
    assert "TTFT p99, 3,741 s, comes" in told[3]


def test_the_least_memory_is_the_least_of_what_was_tried() -> None:
    calm = [row(200, 8, preemptions=0), row(100, 16, preemptions=0, is_base=True)]
    told = sentences(made(*calm, row(200, 16, preemptions=0)))[-1]
    assert told == (
        "The least memory tried without a preemption is 100 blocks of 16 tokens, or as much in "
        "blocks of another size (num-blocks 200, block-size 8; num-blocks 100, block-size 16); "
        "none smaller was tried."
    )
    assert "none smaller" not in sentences(made(*calm, row(99, 8, preemptions=3)))[-1]


def test_where_steps_are_counted_nothing_is_in_seconds() -> None:
    counted = replace(RESULT, settings={**RESULT.settings, "by-step": True})
    first, _, fastest, _ = sentences(counted)
    assert first.startswith("As it was (") and first.endswith("steps (p99).")
    assert fastest.endswith(" steps, comes with every choice.")
    told = readable(what_if_html(counted))
    assert told.count("TTFT p99 (steps)") == 2
    assert "Waste (%)" in told and WASTE.definition in told
    assert not re.findall(r"[^()]{1,30}\((?:s|ms|[a-z]+/s)\)", told)  # in definitions, either
    assert "Output (tokens/step)" in told and "TPOT p50, p90, p99 (steps)" in told
    assert "Time is counted in steps" in told and "Time is counted" not in readable(HTML)


def test_memory_that_is_as_large_but_for_a_rounding_is_told_as_it_was() -> None:
    rows = (row(1_000, 16, preemptions=0), row(1_001, 16, preemptions=0, is_base=True))
    assert "is 1,001 blocks of 16 tokens" in sentences(made(*rows))[-1]


def test_a_choice_that_refuses_requests_is_never_the_best() -> None:
    greedy = row(9, 16, hit_rate_first=0.9, preemptions=0, refused=("request 3: too long",))
    fit = tuple(replace(r, scheme=replace(r.scheme, preemptions=1)) for r in RESULT.rows)
    *told, left_out = sentences(replace(RESULT, rows=(greedy, *fit)))
    assert not any("num-blocks 9" in line for line in told)
    assert told[:2] == list(sentences(replace(RESULT, rows=fit)))[:2]
    assert left_out == (
        "Left out of these, for the requests refused: num-blocks 9, block-size 16 (1)."
    )
    many = [replace(greedy, values=(f"{n}", "16")) for n in range(1, 7)]
    assert sentences(replace(RESULT, rows=(*many, *fit)))[-1].endswith(
        ": num-blocks 1, block-size 16 (1); num-blocks 2, block-size 16 (1); "
        "num-blocks 3, block-size 16 (1); 3 more."
    )
    alone = replace(greedy, is_base=True)
    [only] = sentences(made(alone))
    assert ", 1 refused, " in only


def test_times_are_not_compared_where_not_as_many_requests_began() -> None:
    fewer = replace(RESULT.rows[0], scheme=replace(PAGED, refused=(), began=PAGED.began - 3))
    told = sentences(replace(RESULT, rows=(fewer, *RESULT.rows[1:])))
    assert not any("TTFT" in line for line in told)
    assert any(f"over {PAGED.began - 3} to {PAGED.began} requests began" in line for line in told)


def test_one_preemption_is_one() -> None:
    assert ", 1 preemption, " in sentences(made(row(9, 16, preemptions=1, is_base=True)))[0]
    assert ", 2 preemptions, " in sentences(made(row(9, 16, preemptions=2, is_base=True)))[0]


def test_columns_without_any_number_are_left_out() -> None:
    without = replace(
        RESULT,
        rows=tuple(replace(r, scheme=replace(r.scheme, hit_rate_first=None)) for r in RESULT.rows),
    )
    assert columns_of(RESULT) == list(COLUMNS)
    assert columns_of(without) == list(COLUMNS[1:])
    assert "hit" not in sentences(without)[0]
    assert "hit-rate-first" not in figures(what_if_html(without))


def test_waste_is_what_is_not_filled() -> None:
    filled = next(metric for metric in METRICS if metric.key == "filled_share")
    assert WASTE.read(PAGED) == pytest.approx(1 - filled.read(PAGED))
    empty = replace(PAGED, share={**dict.fromkeys(PAGED.share, 0.0), "free": 1.0})
    assert WASTE.read(empty) is None


def test_every_number_of_every_choice_is_in_the_page_as_text() -> None:
    rows = [
        [unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", line)]
        for line in re.findall(r"<tr><th scope=row[^>]*>(.*?</tr>)", HTML)
    ]
    for choice in RESULT.rows:
        shown = [show_metric(metric, choice.scheme) for metric in COLUMNS]
        assert [*choice.values, f"{choice.num_blocks:,}", *shown] in rows


def test_the_charts_have_a_line_for_each_other_setting_and_the_base_on_top() -> None:
    drawn = figures(HTML)
    assert set(drawn) == {"hit-rate-first", "waste", "preemptions", "ttft-s-p99"}
    *lines, base = drawn["preemptions"]["data"]
    assert [(line["name"], line["x"], line["y"]) for line in lines] == [
        ("block-size 16", ["50", "100", "300"], [7, 2, 0]),
        ("block-size 32", ["50", "100"], [5, 0]),
    ]
    assert (base["x"], base["y"]) == (["100"], [2])
    assert base["cliponaxis"] is False  # where its number is 0, half of it would be missing


MEASURED = replace(RESULT, measured_ttft_s=Percentiles(0.79, 1.5, 2.25))


def test_what_was_measured_stands_beside_what_is_simulated() -> None:
    first, measured, *others = sentences(MEASURED)
    assert measured == "Measured in that run: first tokens after 0.790 s (p50) and 2.25 s (p99)."
    assert [first, *others] == list(sentences(RESULT))
    html = what_if_html(MEASURED)
    rows = re.findall(r"<tr><th scope=row[^>]*>(.*?</tr>)", html)
    [place] = [i for i, line in enumerate(rows) if "measured in that run" in line]
    assert readable(rows[place]).startswith("◇measured in that run")
    assert readable(rows[place - 1]).startswith("◆simulated at its own settings")
    cells = re.findall(r"<td>(.*?)</td>", rows[place])
    assert cells == ["", "", "", "", "", "", "0.790", "2.25", ""]
    assert len(cells) == rows[place - 1].count("<td")
    assert "the hollow one what was measured in that run." in readable(html)
    *_, base, hollow = figures(html)["ttft-s-p99"]["data"]
    assert (hollow["x"], hollow["y"]) == (base["x"], [2.25])
    assert hollow["marker"]["symbol"] == "diamond-open"
    assert len(figures(html)["waste"]["data"]) == len(figures(HTML)["waste"]["data"])
    assert "measured in that run" not in HTML
    some_refused = replace(RESULT.rows[0].scheme, refused=("request 1 needs more",))
    refusing = replace(
        MEASURED, rows=(replace(MEASURED.rows[0], scheme=some_refused), *MEASURED.rows[1:])
    )
    rows = re.findall(r"<tr><th scope=row[^>]*>(.*?</tr>)", what_if_html(refusing))
    assert len({line.count("<td") for line in rows if "<td" in line and "</th>" in line}) <= 2


def test_a_flag_is_not_broken_between_its_hyphens() -> None:
    assert '<span class="nowrap">--json</span> FILE' in HTML
    assert prose("a <b> --no-prefix-caching x") == (
        'a &lt;b&gt; <span class="nowrap">--no-prefix-caching</span> x'
    )


def test_more_lines_than_can_be_told_apart_are_left_out_and_said() -> None:
    rows = [row(blocks, size) for size in range(1, 9) for blocks in (*range(10, 19), 20)]
    result = made(replace(rows[0], is_base=True), *rows[1:])
    html = what_if_html(result)
    assert len(figures(html)["waste"]["data"]) == MOST_LINES + 1
    assert f"The first {MOST_LINES} of 8 lines." in readable(html)


def test_what_comes_from_the_user_is_shown_and_not_run() -> None:
    html = what_if_html(
        replace(
            RESULT,
            trace_name=EVIL,
            trace_format=EVIL,
            command=EVIL,
            settings={EVIL: EVIL},
            names=(EVIL, EVIL),
            remarks=(EVIL,),
            rows=(replace(RESULT.base, values=(EVIL, EVIL)),),
        )
    )
    assert "<script>window" not in html and "<img" not in html
    assert EVIL in unescape(html)


def test_the_page_is_whole_in_itself() -> None:
    assert "default-src 'none'" in HTML and "://" not in HTML
    ids = re.findall(r'\bid="([^"]+)"', HTML)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', HTML)) <= set(ids)
    assert what_if_html(RESULT) == HTML


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1440, 1280, 390], ids=["desk", "laptop", "phone"])
def test_the_page_is_drawn_without_an_error(
    browser: Browser, tmp_path: Path, width: int, dark: bool
) -> None:
    path = tmp_path / "what-if.html"
    path.write_bytes(page_bytes(what_if_html(MEASURED)))
    browser.open(path, width=width, height=900, dark=dark, touch=width < 500)
    assert browser.errors == []
    assert browser.evaluate("document.documentElement.dataset.charts") == "drawn"
    drawn = "[...document.querySelectorAll('.chart')].filter(c => c.querySelector('.main-svg'))"
    assert browser.evaluate(f"{drawn}.length") == len(figures(HTML))
    assert browser.evaluate("document.querySelectorAll('#ttft-s-p99 .points path').length") == 7
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    table = "document.querySelector('#s-numbers .scroll')"
    fits = browser.evaluate(f"{table}.scrollWidth <= {table}.clientWidth")
    assert fits == (width > 500)  # no number of a choice is out of sight on a wide page
    assert browser.evaluate(f"{table}.previousElementSibling.hidden") == fits
