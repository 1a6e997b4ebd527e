"""Azure LLM inference traces of 2023 (Patel et al., Splitwise, ISCA 2024) and 2024 (Stojkovic et
al., DynamoLLM, HPCA 2025): code completion and conversation, lengths only."""

from __future__ import annotations

from pagedkv.simulate.trace_formats.fields import Container, Field, Kind, TraceFormat

AZURE = TraceFormat(
    name="azure",
    container=Container.CSV,
    fields=(
        Field("TIMESTAMP", Kind.DATETIME),
        Field("ContextTokens", Kind.COUNT),
        Field("GeneratedTokens", Kind.COUNT),
    ),
    arrival="TIMESTAMP",
    prompt="ContextTokens",
    output="GeneratedTokens",
    units_per_second=1_000_000_000,
)
