"""What a simulation's result looks like in a terminal and in a pipe."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from models.sample_results import PAPER, nan_result, sample_result
from pagedkv.simulate.headline import NO_PREFIX_IDS, headlines
from pagedkv.simulate.metrics import CURVE_DEFINITIONS, METRICS
from pagedkv.simulate.palette import STYLES
from pagedkv.simulate.results import KINDS
from pagedkv.simulate.table import explain, print_paper_comparison, print_result

RESULT = sample_result(num_requests=60)


def _printed(show, *, width: int = 80, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    show(Console(file=file, width=width, force_terminal=False))
    file.flush()
    return raw.getvalue().decode(encoding)


def _words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("result", [RESULT, nan_result()], ids=["full", "nothing observed"])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_cut(result, width) -> None:
    text = _printed(lambda c: print_result(result, c), width=width)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert "…" not in text


def test_in_eighty_columns_all_four_schemes_share_one_table() -> None:
    long_run = replace(
        RESULT,
        schemes=tuple(replace(s, recomputed_tokens=12_345_678) for s in RESULT.schemes),
    )
    lines = _printed(lambda c: print_result(long_run, c)).splitlines()
    (row,) = [line for line in lines if "Recomputed" in line]
    assert row.count("12,345,678") == 4


def test_schemes_that_do_not_fit_continue_in_a_table_below() -> None:
    text = _printed(lambda c: print_result(RESULT, c), width=60)
    assert text.count("Token states (%)") == 2
    assert all(scheme.scheme in text for scheme in RESULT.schemes)


def test_the_headlines_come_before_the_table() -> None:
    text = _words(_printed(lambda c: print_result(RESULT, c)))
    for sentence in headlines(RESULT):
        assert text.index(sentence) < text.index("Where the memory goes")


def test_every_bar_is_equally_long_and_cut_by_the_shares() -> None:
    lines = _printed(lambda c: print_result(RESULT, c)).splitlines()
    bars = [line.split()[1] for line in lines if line[:15].strip() in _names() and "█" in line]
    assert len(bars) == len(RESULT.schemes)
    assert {len(bar) for bar in bars} == {80 - len("reserve-exact") - 2}
    for bar, scheme in zip(bars, RESULT.schemes, strict=True):
        for kind in KINDS:
            cells = bar.count(STYLES[kind].sign)
            assert abs(cells - scheme.share[kind] * len(bar)) <= 1


def _names() -> set[str]:
    return {scheme.scheme for scheme in RESULT.schemes}


def test_a_pipe_gets_no_escape_codes() -> None:
    assert "\x1b" not in _printed(lambda c: print_result(RESULT, c))
    assert "\x1b" not in _printed(explain)


def test_colours_are_there_in_a_terminal_and_gone_without_colour() -> None:
    def rendered(**how) -> str:
        file = io.StringIO()
        console = Console(file=file, width=80, force_terminal=True, color_system="truecolor", **how)
        print_result(RESULT, console)
        return file.getvalue()

    # How blue is written depends on the first terminal of the process: Rich remembers it.
    assert "\x1b[3" in rendered()
    assert "\x1b[3" not in rendered(no_color=True)


def test_a_terminal_without_unicode_gets_ascii_and_the_same_numbers() -> None:
    odd = replace(RESULT, trace_name="prüfung", remarks=("größer als ±1",))
    text = _printed(lambda c: print_result(odd, c), encoding="ascii")
    assert "pr?fung" in text
    assert "#" * 5 in text
    assert f"{100 * RESULT.schemes[0].share['token_states']:.1f}" in text
    _printed(explain, encoding="ascii")
    _printed(lambda c: print_paper_comparison(PAPER, c), encoding="ascii")


def test_a_trace_without_prefix_ids_says_so_and_shows_no_hit_rate() -> None:
    without = sample_result(num_requests=20, with_prefix_ids=False)
    text = _printed(lambda c: print_result(without, c))
    assert NO_PREFIX_IDS in _words(text)
    assert "Hit rate" not in text


def test_the_curve_names_the_smallest_memory_for_each_share_and_this_memory() -> None:
    assert RESULT.curve is not None
    text = _words(_printed(lambda c: print_result(RESULT, c)))
    for share, blocks in RESULT.curve.smallest.items():
        assert f"{100 * share:g} % of the ceiling" in text
        assert f" {blocks:,} " in text
    assert "the memory simulated here" in text
    assert "at most 36.64 % can hit" in text  # to the decimals of the rows below


def test_what_comes_from_the_user_is_text_and_not_markup() -> None:
    odd = replace(RESULT, trace_name="[bold]x[/] \x1b[31m", remarks=("[red]a[/red]",))
    text = _printed(lambda c: print_result(odd, c))
    assert "[bold]x[/]" in text
    assert "[red]a[/red]" in text
    assert "\x1b" not in text


def test_of_many_refused_requests_some_are_named_and_the_rest_counted() -> None:
    text = _words(_printed(lambda c: print_result(nan_result(), c)))
    assert "reserve-max refused 9" in text
    assert "request 2 needs" in text
    assert "request 3 needs" not in text
    assert "and 6 more" in text


def test_explain_defines_every_metric() -> None:
    text = _words(_printed(explain))
    for definition in (*METRICS, *CURVE_DEFINITIONS):
        assert definition.definition in text


def test_a_figure_at_its_bar_is_within_it_and_one_beyond_is_not() -> None:
    at_bar, below_floor, relative, fitted = PAPER
    assert at_bar.difference == pytest.approx(8.0) and at_bar.within_bar
    assert not below_floor.within_bar
    assert relative.difference == pytest.approx(20.0) and relative.within_bar
    assert not replace(relative, ours=20.0).within_bar
    assert not replace(at_bar, ours=12.0).within_bar
    assert [row.verdict for row in PAPER] == ["yes", "NO", "yes", "fitted"]
    assert replace(fitted, ours=90.0).verdict == "NO"


def test_the_paper_comparison_shows_both_numbers_and_counts_what_is_within() -> None:
    text = _printed(lambda c: print_paper_comparison(PAPER, c))
    assert max(cell_len(line) for line in text.splitlines()) <= 80
    (row,) = [line for line in text.splitlines() if "Orca" in line]
    for cell in ("20.40", "28.40", "+8.0", "± 8", "yes"):
        assert cell in row
    assert "+20.0 %" in text and "min 96" in text and "NO" in text
    assert "2 of 3 figures within the bar, and 1 fitted ones." in text
