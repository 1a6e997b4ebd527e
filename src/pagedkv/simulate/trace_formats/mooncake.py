"""Mooncake traces (Qin et al., FAST 2025): milliseconds, and one id for each 512 prompt tokens."""

from __future__ import annotations

from pagedkv.simulate.trace_formats.fields import Container, Field, Kind, TraceFormat

MOONCAKE = TraceFormat(
    name="mooncake",
    container=Container.JSONL,
    fields=(
        Field("timestamp", Kind.NUMBER),
        Field("input_length", Kind.COUNT),
        Field("output_length", Kind.COUNT),
        Field("hash_ids", Kind.IDS, optional=True),  # other tools write this format without them
    ),
    arrival="timestamp",
    prompt="input_length",
    output="output_length",
    units_per_second=1_000,
    prefix_ids="hash_ids",
    granularity=512,
)
