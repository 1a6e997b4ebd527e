"""A simulation's result as JSON: every number, under keys that stay.

`KEYS` documents each key; a test holds it against what is written. Shares are from 0 to 1, times
in seconds, sizes in bytes; what was not observed is null, never NaN. A later version may add keys;
removing one or changing its meaning raises `version`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pagedkv.simulate.headline import curve_bytes
from pagedkv.simulate.metrics import CURVE_DEFINITIONS, METRICS
from pagedkv.simulate.results import (
    KINDS,
    HitRateCurve,
    MemoryMap,
    SchemeResult,
    SimulationResult,
    Timeline,
    WhatIfResult,
)

FORMAT = "pagedkv-simulation"
VERSION = 1

MEASURED_KEYS = {
    f"measured.ttft_s.p{percent}": "Of a recorded run that is simulated as it was: how long first "
    "tokens took in that run; null where that is not known."
    for percent in (50, 90, 99)
}

KEYS: dict[str, str] = {
    "format": f'Always "{FORMAT}".',
    "version": f"Version of these keys: {VERSION}.",
    "command": "What to type to run the simulation again.",
    "settings.*": "Every setting by the name of its flag.",
    "trace.name": "The trace file, or the name of the built-in workload.",
    "trace.format": "What kind of trace it is.",
    "trace.num_requests": "Requests in it.",
    "trace.num_answers": "Answers generated to them: `--samples` to each, or as recorded.",
    "trace.prompt_tokens": "Prompt tokens of all requests.",
    "trace.output_tokens": "Output tokens of all answers.",
    "memory.num_blocks": "Physical blocks of the KV memory.",
    "memory.block_size": "Tokens that a block holds.",
    "memory.bytes_per_token": "Bytes of keys and values of one token; null where not given.",
    "memory.capacity_bytes": "The whole KV memory; null where not given.",
    **MEASURED_KEYS,
    "remarks[]": "What the user should know about this run, a line each.",
    "schemes[].scheme": "Name of the scheme.",
    "schemes[].placement": "How contiguous regions are placed; null for paged.",
    **{f"schemes[].{metric.key}": metric.definition for metric in METRICS},
    "schemes[].refused[]": "One line for each refused request.",
    "schemes[].timeline.start_s[]": "Start of each interval of the timeline.",
    "schemes[].timeline.end_s[]": "End of each interval.",
    **{
        f"schemes[].timeline.share.{kind}[]": f"Share of {kind} in each interval, time-weighted."
        for kind in KINDS
    },
    "schemes[].timeline.running[]": "Running requests in each interval, time-weighted mean.",
    "schemes[].timeline.waiting[]": "Waiting requests in each interval, time-weighted mean.",
    "schemes[].memory_map.time_s[]": "When each snapshot (column) was taken.",
    "schemes[].memory_map.slots_per_row": "Neighbouring slots that one row stands for.",
    "schemes[].memory_map.kinds[]": "Names of the numbers in `kind`.",
    "schemes[].memory_map.kind[][]": "Rows of snapshots: one of the kinds of the row's slots, "
    "each in as many rows as its share.",
    "schemes[].memory_map.shared[][]": "1 where several sequences use what is shown.",
    "curve": "The hit-rate curve; null where the trace has no prefix ids.",
    "curve.block_size": "Tokens of a block of the curve.",
    **{
        f"curve.{d.key}": d.definition
        for d in CURVE_DEFINITIONS
        if d.key in ("accesses", "distinct", "ceiling")
    },
    "curve.smallest[].share_of_ceiling": "A share of the ceiling.",
    "curve.smallest[].blocks": "The fewest blocks that reach it.",
    "curve.smallest[].bytes": "The same in bytes; null where a token's size is not given.",
    "curve.blocks[]": "Sizes of memory at which the hit rate changes, thinned to a few thousand.",
    "curve.hit_rate[]": "Hit rate from that size on.",
    "comparison[].figure": "A figure of the paper that a preset repeats.",
    "comparison[].system": "The system that it is about.",
    "comparison[].quantity": "What is compared.",
    "comparison[].unit": "Unit of the numbers; empty for requests.",
    "comparison[].paper": "The paper's number.",
    "comparison[].ours": "The number of this simulation.",
    "comparison[].bar": "How far they may be apart, or what ours must reach.",
    "comparison[].bar_kind": "points (of the unit), percent (of the paper's), or at least.",
    "comparison[].is_fitted": "Whether the simulation was fitted to it and predicts nothing.",
    "comparison[].within_bar": "Whether it holds.",
}
"""path -> meaning; `[]` stands for the items of a list, `*` for names that vary."""


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """A result that is dictionaries and lists already, as what a file of it holds: UTF-8."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    # surrogateescape names (odd file names on Linux) must not stop the writing
    return text.encode("utf-8", errors="replace") + b"\n"


def heading_of(
    result: SimulationResult | WhatIfResult, *, file_format: str, version: int
) -> dict[str, Any]:
    """What every kind of result begins with: what it is, how to repeat it, and the traffic."""
    measured = result.measured_ttft_s
    return {
        "format": file_format,
        "version": version,
        "command": result.command,
        "settings": dict(result.settings),
        "trace": {
            "name": result.trace_name,
            "format": result.trace_format,
            "num_requests": result.num_requests,
            "num_answers": result.num_answers,
            "prompt_tokens": result.prompt_tokens,
            "output_tokens": result.output_tokens,
        },
        "measured": {
            "ttft_s": {
                name: None if measured is None else getattr(measured, name)
                for name in ("p50", "p90", "p99")
            }
        },
    }


def as_json(result: SimulationResult) -> dict[str, Any]:
    """The result as dictionaries, lists, numbers and strings, with the keys of `KEYS`."""
    slots = result.num_blocks * result.block_size
    content = {
        **heading_of(result, file_format=FORMAT, version=VERSION),
        "memory": {
            "num_blocks": result.num_blocks,
            "block_size": result.block_size,
            "bytes_per_token": result.bytes_per_token,
            "capacity_bytes": (
                None if result.bytes_per_token is None else slots * result.bytes_per_token
            ),
        },
        "remarks": list(result.remarks),
        "schemes": [_scheme(scheme) for scheme in result.schemes],
        "curve": None if result.curve is None else _curve(result.curve, result),
        "comparison": [
            asdict(figure) | {"within_bar": figure.within_bar} for figure in result.comparison
        ],
    }
    plain: dict[str, Any] = plain_json(content)
    return plain


def metrics_of(scheme: SchemeResult) -> dict[str, Any]:
    """Every metric of the scheme, under its key: a dot in it is a level."""
    content: dict[str, Any] = {}
    for metric in METRICS:
        *parents, last = metric.key.split(".")
        level = content
        for parent in parents:
            level = level.setdefault(parent, {})
        level[last] = metric.read(scheme)
    return content


def _scheme(scheme: SchemeResult) -> dict[str, Any]:
    content: dict[str, Any] = {"scheme": scheme.scheme, "placement": scheme.placement}
    content |= metrics_of(scheme)
    content["refused"] = list(scheme.refused)
    content["timeline"] = _timeline(scheme.timeline)
    content["memory_map"] = _memory_map(scheme.memory_map)
    return content


def _timeline(timeline: Timeline) -> dict[str, Any]:
    return {
        "start_s": timeline.start_s,
        "end_s": timeline.end_s,
        "share": {kind: timeline.share[:, i] for i, kind in enumerate(KINDS)},
        "running": timeline.running,
        "waiting": timeline.waiting,
    }


def _memory_map(memory_map: MemoryMap) -> dict[str, Any]:
    return {
        "time_s": memory_map.time_s,
        "slots_per_row": memory_map.slots_per_row,
        "kinds": KINDS,
        "kind": memory_map.kind,
        "shared": memory_map.shared,
    }


def _curve(curve: HitRateCurve, result: SimulationResult) -> dict[str, Any]:
    return {
        "block_size": curve.block_size,
        "accesses": curve.accesses,
        "distinct": curve.distinct,
        "ceiling": curve.ceiling,
        "smallest": [
            {
                "share_of_ceiling": share,
                "blocks": blocks,
                "bytes": curve_bytes(curve, int(blocks), result),
            }
            for share, blocks in sorted(curve.smallest.items())
        ],
        "blocks": curve.blocks,
        "hit_rate": curve.hit_rate,
    }


def plain_json(value: Any) -> Any:
    """`value` with arrays as lists, NumPy's numbers as Python's, and null for NaN and infinity."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
