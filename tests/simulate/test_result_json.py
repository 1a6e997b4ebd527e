"""The JSON of a result: every number, documented keys, valid for any reader."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np

from models.sample_results import nan_result, sample_result
from pagedkv.simulate.metrics import METRICS
from pagedkv.simulate.result_json import FORMAT, KEYS, VERSION, as_json, json_bytes
from pagedkv.simulate.results import KINDS

RESULT = sample_result(num_requests=60)


def _written(result):
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(json_bytes(as_json(result)).decode(), parse_constant=refuse)


def _paths(value, path: str = ""):
    if isinstance(value, dict) and path == "settings":
        yield "settings.*"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _paths(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for item in value:
            yield from _paths(item, path + "[]")
    else:
        yield path


def test_every_key_is_documented_and_every_documented_key_is_written() -> None:
    written = set(_paths(_written(nan_result())))
    assert written == set(KEYS) - {"curve"}
    without = set(_paths(_written(sample_result(with_prefix_ids=False, num_requests=9))))
    assert {path for path in without if path.startswith("curve")} == {"curve"}


def test_the_numbers_are_those_of_the_result() -> None:
    content = _written(RESULT)
    assert (content["format"], content["version"]) == (FORMAT, VERSION)
    assert content["command"] == RESULT.command
    assert content["settings"] == RESULT.settings
    assert content["memory"]["capacity_bytes"] == 981 * 16 * 819_200
    for written, scheme in zip(content["schemes"], RESULT.schemes, strict=True):
        for metric in METRICS:
            value = written
            for key in metric.key.split("."):
                value = value[key]
            assert value == metric.read(scheme), metric.key
        timeline = written["timeline"]
        for i, kind in enumerate(KINDS):
            assert np.array_equal(timeline["share"][kind], scheme.timeline.share[:, i])
        assert np.array_equal(timeline["waiting"], scheme.timeline.waiting)
        assert np.array_equal(written["memory_map"]["kind"], scheme.memory_map.kind)
        assert np.array_equal(written["memory_map"]["shared"], scheme.memory_map.shared)


def test_the_curve_is_written_whole_with_bytes_where_they_are_known() -> None:
    assert RESULT.curve is not None
    curve = _written(RESULT)["curve"]
    assert np.array_equal(curve["blocks"], RESULT.curve.blocks)
    assert np.array_equal(curve["hit_rate"], RESULT.curve.hit_rate)
    half = next(entry for entry in curve["smallest"] if entry["share_of_ceiling"] == 0.5)
    assert half["blocks"] == RESULT.curve.smallest[0.5]
    assert half["bytes"] == half["blocks"] * 16 * 819_200
    unknown = _written(replace(RESULT, bytes_per_token=None))["curve"]["smallest"]
    assert all(entry["bytes"] is None for entry in unknown)


def test_what_was_not_observed_is_null() -> None:
    content = _written(nan_result())
    assert content["schemes"][0]["tpot_s"] == {"p50": None, "p90": None, "p99": None}
    odd = replace(RESULT.schemes[0], running_mean=math.inf)
    content = _written(replace(RESULT, schemes=(odd,)))
    assert content["schemes"][0]["running_mean"] is None


def test_no_prefix_ids_means_null_and_not_a_rate_of_zero() -> None:
    content = _written(sample_result(with_prefix_ids=False, num_requests=20))
    assert content["curve"] is None
    assert all(scheme["hit_rate_first"] is None for scheme in content["schemes"])


def test_names_keep_their_letters() -> None:
    odd = replace(RESULT, trace_name='größe "</script>"')
    assert _written(odd)["trace"]["name"] == 'größe "</script>"'
