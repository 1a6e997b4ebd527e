"""A what-if as JSON: every metric of every choice, under keys that stay.

`KEYS` documents each key. Units are those of `result_json`: shares from 0 to 1, seconds, bytes.
"""

from __future__ import annotations

from typing import Any

from pagedkv.simulate.metrics import METRICS, WASTE
from pagedkv.simulate.result_json import (
    MEASURED_KEYS,
    heading_of,
    metrics_of,
    plain_json,
)
from pagedkv.simulate.results import WhatIfResult

FORMAT = "pagedkv-what-if"
VERSION = 1

KEYS: dict[str, str] = {
    "format": f'Always "{FORMAT}".',
    "version": f"Version of these keys: {VERSION}.",
    "command": "What to type to run it again.",
    "settings.*": "Every setting as it was, by the name of its flag.",
    "trace.name": "The trace file, or the name of the built-in workload.",
    "trace.format": "What kind of trace it is.",
    "trace.num_requests": "Requests in it.",
    "trace.num_answers": "Answers generated to them.",
    "trace.prompt_tokens": "Prompt tokens of all requests.",
    "trace.output_tokens": "Output tokens of all answers.",
    **MEASURED_KEYS,
    "bytes_per_token": "Bytes of keys and values of one token; null where not given.",
    "varied[]": "The settings that were varied.",
    "remarks[]": "What the user should know, a line each.",
    "choices[].values.*": "What each varied setting was, as asked for.",
    "choices[].is_base": "True for the one choice in which nothing is varied.",
    "choices[].num_blocks": "Physical blocks.",
    "choices[].block_size": "Tokens that a block holds.",
    f"choices[].{WASTE.key}": WASTE.definition,
    **{f"choices[].{metric.key}": metric.definition for metric in METRICS},
    "choices[].refused[]": "One line for each refused request.",
}


def what_if_as_json(result: WhatIfResult) -> dict[str, Any]:
    """The result as dictionaries, lists, numbers and strings, with the keys of `KEYS`."""
    content = {
        **heading_of(result, file_format=FORMAT, version=VERSION),
        "bytes_per_token": result.bytes_per_token,
        "varied": list(result.names),
        "remarks": list(result.remarks),
        "choices": [
            {
                "values": dict(zip(result.names, row.values)),
                "is_base": row.is_base,
                "num_blocks": row.num_blocks,
                "block_size": row.block_size,
                WASTE.key: WASTE.read(row.scheme),
                **metrics_of(row.scheme),
                "refused": list(row.scheme.refused),
            }
            for row in result.rows
        ],
    }
    plain: dict[str, Any] = plain_json(content)
    return plain
