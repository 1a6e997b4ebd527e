"""Our own format, for traces that come from elsewhere and for recorded runs: docs/traces.md."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray

from pagedkv.errors import TraceError
from pagedkv.simulate.trace import Trace
from pagedkv.simulate.trace_formats.fields import (
    Container,
    Field,
    Kind,
    Table,
    TraceFormat,
    missing,
)
from pagedkv.simulate.trace_formats.measured import lists_of
from pagedkv.simulate.trace_formats.recorded import FIELDS
from pagedkv.simulate.trace_formats.source import display_name


def _sessions(table: Table, file: str) -> NDArray[np.int64]:
    return table.columns["session"]


def _prefix_layout(table: Table, file: str) -> tuple[int, bool]:
    """Tokens for each id, and whether ids go on over the output: the same on every line."""
    granularity = table.columns["prefix_granularity"]
    given = table.present["prefix_granularity"]
    if not np.all(given):
        raise missing("prefix_granularity", file, int(table.line[np.argmin(given)]))
    for name in ("prefix_granularity", "covers_output"):
        differs = table.columns[name] != table.columns[name][0]
        if np.any(differs):
            line = int(table.line[np.argmax(differs)])
            problem = f"is not the same as on line {int(table.line[0])}"
            raise TraceError(problem, file=file, line=line, field=name)
    if granularity[0] == 0:
        problem = "must be at least 1"
        raise TraceError(problem, file=file, line=int(table.line[0]), field="prefix_granularity")
    return int(granularity[0]), bool(table.columns["covers_output"][0])


PLAIN = TraceFormat(
    name="plain",
    container=Container.JSONL,
    fields=(
        Field("arrival_s", Kind.NUMBER),
        Field("prompt_tokens", Kind.COUNT),
        Field("output_tokens", Kind.COUNT),
        Field("session", Kind.LABEL, optional=True),
        Field("prefix_ids", Kind.IDS, optional=True),
        Field("prefix_granularity", Kind.COUNT, optional=True),
        Field("covers_output", Kind.FLAG, optional=True),
        *FIELDS,
    ),
    arrival="arrival_s",
    prompt="prompt_tokens",
    output="output_tokens",
    prefix_ids="prefix_ids",
    prefix_layout=_prefix_layout,
    sessions=_sessions,
    fails_with_no_output=False,  # written by hand or by us: a 0 here is a mistake to hear about
)


def write_trace(trace: Trace, path: str) -> None:
    """Write `trace` in the plain format, compressed where `path` ends in .gz or .zst.

    The file appears whole or not at all: it is written beside its place and then moved there.
    Reading it back gives the same columns; sessions are numbered anew, by first appearance.
    Raises TraceError where the place cannot be written to, and for a trace that was read by its
    steps, which no longer knows its seconds.
    """
    if trace.interruptions is not None:
        raise TraceError("a run read by its steps is not written", file=display_name(path))
    if len(trace) == 0:
        raise TraceError("a trace without requests is not written", file=display_name(path))
    place = Path(path)
    try:
        content = b"".join(_lines(trace))
        if place.suffix == ".gz":
            content = gzip.compress(content, mtime=0)  # the same trace gives the same bytes
        elif place.suffix == ".zst":
            content = zstandard.ZstdCompressor().compress(content)
        beside = place.with_name(f".{place.name}.{os.getpid()}.part")
        try:
            beside.write_bytes(content)
            os.replace(beside, place)
        except BaseException:  # Ctrl-C too must leave nothing behind
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}"
        raise TraceError(problem, file=display_name(path)) from error
    except ValueError as error:  # no file name at all, or a NUL character in it
        raise TraceError("is not a file name", file=display_name(path)) from error


def _lines(trace: Trace) -> Iterator[bytes]:
    offsets = trace.prefix_offsets.tolist()
    columns = (trace.arrival_s, trace.prompt_tokens, trace.output_tokens, trace.session)
    waited_s = trace.measured_ttft_s
    samples = [0] * len(trace) if trace.sample is None else trace.sample.tolist()
    request = -1
    for i, (arrival_s, prompt, output, session, sample) in enumerate(
        zip(*(column.tolist() for column in columns), samples, strict=True)
    ):
        line = {"arrival_s": arrival_s, "prompt_tokens": prompt, "output_tokens": output}
        if trace.sample is not None:
            request += sample == 0
            line |= {"request": request, "sample": sample}
        if trace.recorded_with is not None and i == 0:
            line["engine"] = dict(trace.recorded_with)
        if waited_s is not None and not np.isnan(waited_s[i]):
            line["first_token_s"] = arrival_s + float(waited_s[i])
        if session >= 0:
            line["session"] = session
        if trace.has_prefix_ids:
            line["prefix_granularity"] = trace.granularity
            if trace.covers_output:
                line["covers_output"] = True
            if offsets[i] == offsets[i + 1]:
                line["unshared"] = True
            line["prefix_ids"] = trace.prefix_ids[offsets[i] : offsets[i + 1]].tolist()
        yield json.dumps(line, separators=(",", ":")).encode() + b"\n"
    if waited_s is not None or trace.measured_steps is not None:
        rest: dict[str, object] = {"under_way": []}
        if trace.measured_steps is not None:
            rest["steps"] = lists_of(trace.measured_steps)
        yield json.dumps(rest, separators=(",", ":")).encode() + b"\n"
