"""The metrics: one list that the table, the report, the JSON and the docs agree on."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from models.sample_results import nan_result, sample_result
from pagedkv.simulate.metrics import (
    CURVE_DEFINITIONS,
    METRICS,
    WASTE,
    applying,
    definitions_by_group,
    filled_share,
    show_metric,
    show_number,
)
from pagedkv.simulate.metrics_page import metrics_page
from pagedkv.simulate.palette import SHARED, STYLES
from pagedkv.simulate.results import KINDS, SchemeResult
from pagedkv.simulate.what_if_json import KEYS as WHAT_IF_KEYS

RESULT = sample_result(num_requests=60)
DOCS = Path(__file__).parents[2] / "docs"


def _metric(key: str):
    return next(metric for metric in METRICS if metric.key == key)


def test_every_number_of_a_scheme_is_a_metric() -> None:
    not_metrics = {"scheme", "placement", "refused", "timeline", "memory_map"}
    roots = {metric.key.split(".")[0] for metric in METRICS} - {"filled_share", "num_refused"}
    assert roots == {field.name for field in fields(SchemeResult)} - not_metrics


def test_every_kind_of_memory_is_a_metric_and_has_a_style_under_the_same_name() -> None:
    assert list(STYLES) == list(KINDS)
    for kind in KINDS:
        assert _metric(f"share.{kind}").label == STYLES[kind].label


def test_kinds_differ_in_colour_and_sign_and_ascii_sign() -> None:
    styles = [*STYLES.values(), SHARED]
    for attribute in ("label", "light", "dark", "terminal", "sign", "ascii_sign"):
        assert len({getattr(style, attribute) for style in styles}) == len(styles)
    assert all(style.ascii_sign.isascii() for style in styles)


def test_keys_are_unique_and_so_are_labels_with_their_units() -> None:
    keys = [metric.key for metric in METRICS]
    labels = [(metric.label, metric.unit) for metric in METRICS]
    assert len(set(keys)) == len(keys)
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize("definition", [*METRICS, *CURVE_DEFINITIONS], ids=lambda d: d.key)
def test_every_definition_is_one_full_sentence_on_one_line(definition) -> None:
    assert definition.definition[0].isupper()
    assert definition.definition.endswith(".")
    assert "\n" not in definition.definition
    assert len(definition.definition) < 200


def test_percentiles_of_one_quantity_become_one_definition() -> None:
    labels = [d.label for ds in definitions_by_group().values() for d in ds]
    assert "TTFT p50, p90, p99" in labels
    assert "TPOT p50, p90, p99" in labels


def test_shares_are_shown_in_percent_and_token_times_in_milliseconds() -> None:
    paged = RESULT.schemes[0]
    shown = f"{100 * paged.share['token_states']:.1f}"
    assert show_metric(_metric("share.token_states"), paged) == shown
    assert show_metric(_metric("tpot_s.p50"), paged) == "31.3"


def test_what_was_not_observed_is_a_dash_and_never_nan() -> None:
    paged = nan_result().schemes[0]
    assert _metric("tpot_s.p99").read(paged) is None
    assert show_metric(_metric("tpot_s.p99"), paged) == "–"
    assert show_number(math.nan, 2) == show_number(math.inf, None) == "–"


def test_held_memory_leaves_out_what_no_request_holds() -> None:
    shares = dict.fromkeys(KINDS, 0.0) | {
        "token_states": 0.3,
        "reserved": 0.2,
        "never_used": 0.1,
        "unusable": 0.15,
        "cached": 0.05,
        "free": 0.2,
    }
    scheme = RESULT.schemes[0]
    assert filled_share(replace(scheme, share=shares)) == pytest.approx(0.5)
    empty = dict.fromkeys(KINDS, 0.0) | {"free": 1.0}
    assert filled_share(replace(scheme, share=empty)) is None


def test_hit_rates_do_not_apply_where_the_trace_has_no_prefix_ids() -> None:
    without = sample_result(num_requests=20, with_prefix_ids=False)
    keys = {metric.key for metric in applying(without.schemes)}
    assert not keys & {"hit_rate_first", "hit_rate_all", "hit_tokens_first"}


def test_the_page_in_the_docs_is_the_one_made_from_the_definitions() -> None:
    written = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert written == metrics_page(), (
        "out of date: python -m pagedkv.simulate.metrics_page > docs/metrics.md"
    )


def test_the_page_has_every_key_of_a_what_if_too_and_defines_waste() -> None:
    what_if = metrics_page().partition("## Keys of the JSON of a what-if")[2]
    listed = re.findall(r"^\| `(.*?)` \| (.*?) \|$", what_if, re.MULTILINE)
    assert dict(listed) == WHAT_IF_KEYS
    assert f"| Waste | % | {WASTE.definition} | `waste` |" in metrics_page()
    assert WASTE.label in [d.label for d in definitions_by_group()["Where the memory goes"]]
