"""From a path to a `Trace`: open, detect, parse, then the checks that all formats share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import TraceError
from pagedkv.simulate.measured_steps import MeasuredSteps
from pagedkv.simulate.trace import Trace
from pagedkv.simulate.trace_formats import recorded
from pagedkv.simulate.trace_formats.csv_lines import read_csv
from pagedkv.simulate.trace_formats.detection import detect_format
from pagedkv.simulate.trace_formats.fields import Container, Table, TraceFormat
from pagedkv.simulate.trace_formats.jsonl import objects_of, read_jsonl
from pagedkv.simulate.trace_formats.progress import WholeLines
from pagedkv.simulate.trace_formats.source import display_name, read_decompressed, trace_name

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_trace(path: str, *, by_step: bool = False) -> Trace:
    """Read the trace at `path` ("-": standard input), whatever format and compression it has.

    `by_step` reads the recording of a run by its steps, for it to be repeated: a second of the
    trace is a step, and whoever was cancelled or failed is told with its step.

    Times become seconds since the first request. Requests whose times go backwards are sorted,
    those that failed are left out, and `remarks` says so. Prefix ids are numbered by first
    appearance. Raises TraceError with file, line and field where something is wrong, also where
    no usable request is left, or where there are no steps.
    """
    file = display_name(path)
    content = read_decompressed(path)
    data, remarks = (content.data + content.cut_data).removeprefix(_BYTE_ORDER_MARK), []
    if recorded.was_recorded(data):
        data, cut = recorded.without_half_a_line(data)
        if content.cut_data:
            remarks.append(
                "the last piece of the recording was cut off: it is read as far as it goes"
            )
        elif cut or content.num_cut_bytes:
            remarks.append(
                f"the last piece of the recording was cut off: {cut or content.num_cut_bytes:,} "
                "bytes of it left out"
            )
    elif content.num_cut_bytes:
        raise content.cut_off(file)
    found = detect_format(data, file)
    steps: MeasuredSteps | None = None
    if found.container is Container.CSV:
        table = read_csv(data, found.fields, file)
    else:
        lines = WholeLines(objects_of(data, file), file, by_step=by_step)
        table = read_jsonl(lines, found.fields, file)
        if lines.cut_off is not None:
            remarks.append(lines.cut_off.remark)
        steps = lines.steps.found()
    trace = _trace(found, table, name=trace_name(path), file=file, by_step=by_step)
    return replace(trace, remarks=(*remarks, *trace.remarks), measured_steps=steps)


def _trace(known: TraceFormat, table: Table, *, name: str, file: str, by_step: bool) -> Trace:
    if len(table) == 0:
        raise TraceError("has a header and no requests", file=file)
    sessions = known.sessions(table, file) if known.sessions else np.full(len(table), -1)
    keep, remarks = _usable(known, table, file, by_step=by_step)
    granularity, covers_output = _check_ids(known, table, keep, file)
    is_recorded = recorded.is_recorded(table)
    time = table.columns[known.arrival]
    if by_step:
        if not is_recorded:
            problem = "is not the recording of a run, and only such a run has steps to go by"
            raise TraceError(problem, file=file)
        recorded.require(table, "arrival_step", file)
        time = table.columns["arrival_step"].astype(np.float64)
    ttft_s: NDArray[np.float64] | None = None
    if is_recorded:
        keep = recorded.in_order(table, keep, time, file)
        if not by_step:
            ttft_s = recorded.measured_ttft_s(table, keep, known.arrival, file)
        remarks += recorded.missing_remark(table)

    arrival = time[keep]
    backwards = np.diff(arrival) < 0
    if np.any(backwards):
        line = int(table.line[keep][1:][np.argmax(backwards)])
        count = int(backwards.sum())
        remarks.append(
            f"times go backwards at {count} {'place' if count == 1 else 'places'}, first on line "
            f"{line}: requests were sorted by arrival"
        )
        keep = keep[np.argsort(arrival, kind="stable")]
        arrival = time[keep]
    ids, offsets = _take_lists(table.ids, table.id_offsets, keep)
    return Trace(
        name=name,
        format=known.name,
        arrival_s=arrival if by_step else (arrival - arrival[0]) / known.units_per_second,
        prompt_tokens=table.columns[known.prompt][keep],
        output_tokens=table.columns[known.output][keep],
        session=sessions[keep],
        prefix_ids=number_by_appearance(ids),
        prefix_offsets=offsets if granularity else np.zeros(len(keep) + 1, np.int64),
        granularity=granularity,
        covers_output=covers_output,
        remarks=tuple(remarks),
        sample=table.columns["sample"][keep] if is_recorded else None,
        interruptions=recorded.interruptions(table, keep) if by_step else None,
        recorded_with=table.settings,
        measured_ttft_s=ttft_s,
    )


def _usable(
    known: TraceFormat, table: Table, file: str, *, by_step: bool
) -> tuple[NDArray[np.int64], list[str]]:
    """The rows of requests that count, int64 [k], and what there is to say about the others."""
    prompt, output = table.columns[known.prompt], table.columns[known.output]
    failed = output == 0
    remarks = []
    cut_short = recorded.was_cut_short(table)
    if not known.fails_with_no_output:
        wrong = failed & ~cut_short
        if np.any(wrong):
            line = int(table.line[np.argmax(wrong)])
            raise TraceError("must be at least 1", file=file, line=line, field=known.output)
    if by_step:
        failed = np.zeros_like(failed)  # what they did until then is repeated
    if np.any(failed):
        count = int(failed.sum())
        line = int(table.line[np.argmax(failed)])
        kind = "failed" if known.fails_with_no_output else "cancelled or failed"
        remarks.append(
            f"{count} {kind} {'request' if count == 1 else 'requests'} (0 output tokens) left "
            f"out, first on line {line}"
        )
        if count == len(table):
            problem = f"no usable request: all {count} have 0 output tokens, so all failed"
            raise TraceError(problem, file=file)
    keep = np.flatnonzero(~failed)
    empty = prompt[keep] == 0
    if np.any(empty):
        line = int(table.line[keep][np.argmax(empty)])
        raise TraceError("must be at least 1", file=file, line=line, field=known.prompt)
    return keep, remarks


def _check_ids(
    known: TraceFormat, table: Table, keep: NDArray[np.int64], file: str
) -> tuple[int, bool]:
    """Granularity (0: no ids) and whether ids cover the output; every request has its number."""
    name = known.prefix_ids
    if name is None:
        return 0, False
    given = table.present.get(name, np.ones(len(table), np.bool_))
    if not np.any(given):
        return 0, False
    if not np.all(given):
        line = int(table.line[np.argmin(given)])
        other = int(table.line[np.argmax(given)])
        problem = f"is missing, though line {other} has it: all requests or none"
        raise TraceError(problem, file=file, line=line, field=name)
    granularity, covers_output = known.granularity, False
    if known.prefix_layout:
        granularity, covers_output = known.prefix_layout(table, file)
    tokens = table.columns[known.prompt][keep]
    if covers_output:
        tokens = tokens + table.columns[known.output][keep]
    needed = -(-tokens // granularity)
    has = np.diff(table.id_offsets)[keep]
    wrong = (has != needed) & ~((has == 0) & recorded.is_unshared(table)[keep])
    if np.any(wrong):
        bad = int(np.argmax(wrong))
        problem = (
            f"has {has[bad]} ids, {tokens[bad]} tokens need {needed[bad]} "
            f"(one for each {granularity}, the last one maybe for fewer)"
        )
        raise TraceError(problem, file=file, line=int(table.line[keep][bad]), field=name)
    return granularity, covers_output


def _take_lists(
    flat: NDArray[np.uint64], offsets: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """The lists of `rows` out of a ragged array, in that order."""
    if len(offsets) == 1:  # a format without lists
        return flat, np.zeros(len(rows) + 1, np.int64)
    lengths = np.diff(offsets)[rows]
    taken = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths, out=taken[1:])
    if taken[-1] == len(flat) and np.array_equal(rows, np.arange(len(offsets) - 1)):
        return flat, taken
    source = np.repeat(offsets[rows] - taken[:-1], lengths) + np.arange(taken[-1])
    return flat[source], taken


def number_by_appearance(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Replace each distinct key by 0, 1, 2, ... in the order in which they first appear."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]
