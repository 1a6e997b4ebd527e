"""Which format a file has, told by the fields of its first line."""

from __future__ import annotations

import io

from pagedkv.errors import TraceError
from pagedkv.simulate.trace_formats.azure import AZURE
from pagedkv.simulate.trace_formats.burstgpt import BURSTGPT
from pagedkv.simulate.trace_formats.csv_lines import columns_of
from pagedkv.simulate.trace_formats.fields import Container, TraceFormat, missing, shown
from pagedkv.simulate.trace_formats.jsonl import object_of
from pagedkv.simulate.trace_formats.mooncake import MOONCAKE
from pagedkv.simulate.trace_formats.plain import PLAIN
from pagedkv.simulate.trace_formats.progress import is_progress
from pagedkv.simulate.trace_formats.qwen_bailian import QWEN_BAILIAN
from pagedkv.simulate.trace_formats.vidur import VIDUR

FORMATS = (AZURE, BURSTGPT, VIDUR, MOONCAKE, QWEN_BAILIAN, PLAIN)
"""Every format that `read_trace` knows; a new one is a file beside these and a name here."""


def detect_format(content: bytes, file: str) -> TraceFormat:
    """The format whose fields the first line has, or that it comes closest to.

    Raises TraceError where it resembles none, or lacks a field of the one it resembles.
    """
    lines = enumerate(io.BytesIO(content), start=1)
    number, line = next(((n, line) for n, line in lines if line.strip()), (0, b""))
    if not line:
        raise TraceError("is empty", file=file)
    first = line.lstrip()[:1]
    if first == b"{":
        container, found = Container.JSONL, list(object_of(line, file, number))
        if is_progress(found):
            return PLAIN
    elif first == b"[":
        problem = "is a JSON list: put each request on a line of its own, without brackets"
        raise TraceError(problem, file=file, line=number)
    elif b"\0" in line:
        raise TraceError("is not a trace: not text at all", file=file)
    else:
        container, found = Container.CSV, columns_of(line, file, number)

    def likeness(known: TraceFormat) -> tuple[int, int]:
        matched = sum(f.name in found for f in known.fields)
        return matched, matched - len(known.fields)  # ties go to the one that misses fewer

    best = max((f for f in FORMATS if f.container is container), key=likeness)
    if likeness(best)[0] < 2:
        fields = shown(", ".join(found))
        problem = f"is not a trace: its fields {fields} are of no format known (docs/traces.md)"
        raise TraceError(problem, file=file, line=number)
    for wanted in best.fields:
        if not wanted.optional and wanted.name not in found:
            raise missing(wanted.name, file, number)
    return best
