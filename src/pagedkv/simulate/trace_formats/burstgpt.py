"""BurstGPT (Wang et al., KDD 2025): 1.4 to 5.3 million requests to ChatGPT and GPT-4, lengths only.

A response of 0 tokens is a request that failed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.simulate.trace_formats.fields import Container, Field, Kind, Table, TraceFormat


def _sessions(table: Table, file: str) -> NDArray[np.int64]:
    return table.columns["Session ID"]  # empty for requests that came through the API


BURSTGPT = TraceFormat(
    name="burstgpt",
    container=Container.CSV,
    fields=(
        Field("Timestamp", Kind.NUMBER),
        Field("Session ID", Kind.LABEL, optional=True),  # since the second release
        Field("Request tokens", Kind.COUNT),
        Field("Response tokens", Kind.COUNT),
    ),
    arrival="Timestamp",
    prompt="Request tokens",
    output="Response tokens",
    sessions=_sessions,
)
