"""Small traces for tests, made from plain numbers."""

from __future__ import annotations

import numpy as np

from pagedkv.simulate.trace import Trace

Request = tuple[float, int, int]
"""Arrival in seconds, prompt tokens, output tokens."""


def made_trace(
    requests: list[Request],
    *,
    ids: list[list[int]] | None = None,
    granularity: int = 0,
    covers_output: bool = False,
) -> Trace:
    """A trace of these requests; `ids` are the prefix ids of each."""
    of_request = [[] for _ in requests] if ids is None else ids
    return Trace(
        name="made",
        format="made",
        arrival_s=np.array([arrival for arrival, _, _ in requests], dtype=np.float64),
        prompt_tokens=np.array([prompt for _, prompt, _ in requests], dtype=np.int64),
        output_tokens=np.array([output for _, _, output in requests], dtype=np.int64),
        session=np.full(len(requests), -1, dtype=np.int64),
        prefix_ids=np.array([i for own in of_request for i in own], dtype=np.int64),
        prefix_offsets=np.cumsum([0, *map(len, of_request)]).astype(np.int64),
        granularity=granularity,
        covers_output=covers_output,
    )
