"""What a recorded run has beyond other traces: answers that belong together, and its steps.

A line is one answer. `request` numbers requests in the order in which they came, `sample` the
answers to one of them. `arrival_step` is how many steps the engine had begun by then, and
`cancelled_step` or `failed_step` say when a request was cut short; `first_token_s` is when an
answer got its first token, by the clock of `arrival_s`. Lines stand in the order in
which requests ended: of those cancelled before the same step, the first line left first.
"""

from __future__ import annotations

import json

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import TraceError
from pagedkv.simulate.trace import Interruptions
from pagedkv.simulate.trace_formats.fields import Field, Kind, Table, missing

FIELDS = (
    Field("request", Kind.COUNT, optional=True),
    Field("sample", Kind.COUNT, optional=True),
    Field("arrival_step", Kind.COUNT, optional=True),
    Field("cancelled_step", Kind.COUNT, optional=True),
    Field("failed_step", Kind.COUNT, optional=True),
    Field("first_token_s", Kind.NUMBER, optional=True),
    Field("unshared", Kind.FLAG, optional=True),
    Field("engine", Kind.SETTINGS, optional=True),
)


def was_recorded(data: bytes) -> bool:
    """Whether these lines are a recording's: the first one has the engine's settings."""
    line, end, _ = data.partition(b"\n")
    if not end or not line.startswith(b"{"):
        return False
    try:
        return "engine" in json.loads(line)
    except (ValueError, RecursionError):
        return False


def without_half_a_line(data: bytes) -> tuple[bytes, int]:
    """The data up to where whole lines end, and how many bytes of a line were behind.

    Whoever records writes a line's end with the line; other hands may leave out the last one.
    """
    end = data.rfind(b"\n") + 1
    try:
        json.loads(data[end:] or b"0")
    except (ValueError, RecursionError):
        return data[:end], len(data) - end
    return data, 0


def is_recorded(table: Table) -> bool:
    """Whether lines tell which request they belong to."""
    return bool(np.any(table.present.get("request", False)))


def was_cut_short(table: Table) -> NDArray[np.bool_]:
    """Rows whose request was cancelled, or ended with a step that failed: bool [n]."""
    cut = np.zeros(len(table), dtype=np.bool_)
    for name in ("cancelled_step", "failed_step"):
        cut |= table.present.get(name, False)
    return cut


def is_unshared(table: Table) -> NDArray[np.bool_]:
    """Rows of which nothing was kept or found, so that they need no ids: bool [n]."""
    found: NDArray[np.bool_] = table.columns.get("unshared", np.zeros(len(table))) != 0
    return found


def in_order(
    table: Table, keep: NDArray[np.int64], time: NDArray[np.float64], file: str
) -> NDArray[np.int64]:
    """The rows `keep` by time, request and sample; `time` is that of each row of the table.

    Raises TraceError where answers that belong together do not fit together.
    """
    require(table, "request", file)
    request, sample = table.columns["request"], table.columns["sample"]
    order = keep[np.lexsort((sample[keep], request[keep], time[keep]))]
    first = sample[order] == 0
    before = np.roll(order, 1)
    follows = (
        (request[order] == request[before])
        & (sample[order] == sample[before] + 1)
        & (table.columns["prompt_tokens"][order] == table.columns["prompt_tokens"][before])
        & (time[order] == time[before])
    )
    if len(order):
        follows[0] = False
    wrong = ~(first | follows)
    if np.any(wrong):
        row = order[np.argmax(wrong)]
        problem = (
            f"{sample[row]} of request {request[row]} does not follow sample {sample[row] - 1} of "
            "it, with the same prompt and arrival"
        )
        raise TraceError(problem, file=file, line=int(table.line[row]), field="sample")
    numbers = request[order][first]
    again = np.diff(numbers) == 0
    if np.any(again):
        row = order[first][1:][np.argmax(again)]
        problem = f"{request[row]} has two first answers"
        raise TraceError(problem, file=file, line=int(table.line[row]), field="request")
    return order


def missing_remark(table: Table) -> list[str]:
    """What to say where requests are missing that came before the last one."""
    numbers = np.unique(table.columns["request"])
    num_missing = int(numbers[-1]) + 1 - len(numbers)
    if num_missing == 0:
        return []
    those = "1 request is" if num_missing == 1 else f"{num_missing} requests are"
    return [
        f"{those} missing that had not ended when the recording did: what they took from the "
        "others is not repeated"
    ]


def measured_ttft_s(
    table: Table, rows: NDArray[np.int64], arrival: str, file: str
) -> NDArray[np.float64] | None:
    """How long each of `rows` waited for its first token, NaN for none; None where none is known.

    `arrival` names the field with the time of arrival. Raises TraceError for a token before that.
    """
    known = table.present["first_token_s"][rows]
    if not np.any(known):
        return None
    waited: NDArray[np.float64] = (
        table.columns["first_token_s"][rows] - table.columns[arrival][rows]
    )
    early = known & (waited < 0)
    if np.any(early):
        line = int(table.line[rows][np.argmax(early)])
        problem = f"is before {arrival}, when the request came"
        raise TraceError(problem, file=file, line=line, field="first_token_s")
    waited[~known] = np.nan
    return waited


def interruptions(table: Table, rows: NDArray[np.int64]) -> Interruptions:
    """Who left and who failed, as places in `rows`, the rows of the table in their order."""
    place = np.full(len(table), -1, dtype=np.int64)
    place[rows] = np.arange(len(rows))

    def ended(name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        found = np.flatnonzero(table.present[name] & (place >= 0))
        step = table.columns[name][found]
        found = found[np.argsort(step, kind="stable")]  # in the order of the lines
        return place[found], table.columns[name][found].astype(np.float64)

    return Interruptions(*ended("cancelled_step"), *ended("failed_step"))


def require(table: Table, name: str, file: str) -> None:
    """Raise TraceError where a line lacks the field `name`."""
    given = table.present[name]
    if not np.all(given):
        raise missing(name, file, int(table.line[np.argmin(given)]))
