"""Traces of the Vidur simulator (Agrawal et al., MLSys 2024): arrivals in seconds and lengths."""

from __future__ import annotations

from pagedkv.simulate.trace_formats.fields import Container, Field, Kind, TraceFormat

VIDUR = TraceFormat(
    name="vidur",
    container=Container.CSV,
    fields=(
        Field("arrived_at", Kind.NUMBER),
        Field("num_prefill_tokens", Kind.COUNT),
        Field("num_decode_tokens", Kind.COUNT),
    ),
    arrival="arrived_at",
    prompt="num_prefill_tokens",
    output="num_decode_tokens",
)
