"""What a trace format says about its fields, and the table that a reader makes of a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import TraceError

MAX_TOKENS = 2**31 - 1
"""The largest token count that is read: beyond every model's context, and sums stay in int64."""

MAX_TIME = 1e15
"""The largest time that is read, in the file's own unit: milliseconds since 1970 fit easily."""


class Kind(Enum):
    """What the values of a field are, and how its column is kept."""

    COUNT = "count"  # a whole number of tokens, at least 0; int64
    NUMBER = "number"  # a finite number; float64
    DATETIME = "date and time"  # UTC unless it says otherwise; int64 nanoseconds since 1970
    LABEL = "label"  # any name or number; int64 code, -1 for none, one numbering for all fields
    IDS = "ids"  # a list of prefix ids; ragged uint64
    FLAG = "flag"  # true or false; int64 1 or 0
    SETTINGS = "settings"  # numbers and flags by name, those of the first line that has any


@dataclass(frozen=True)
class Field:
    """One field of a format. An optional one may be missing, or null, on any line."""

    name: str
    kind: Kind
    optional: bool = False


@dataclass(frozen=True)
class Table:
    """The fields of a file as columns, one row for each line that holds a request.

    `line` int64 [n], 1-based line in the file. `columns`: by field name, [n], the dtypes that
    `Kind` tells. `present`: by the name of an optional field, bool [n].
    `ids` uint64 [m] and `id_offsets` int64 [n + 1]: the ragged column of kind IDS.
    `labels`: the code of each label. `settings`: what the field of kind SETTINGS says.
    """

    line: NDArray[np.int64]
    columns: dict[str, NDArray[Any]]
    present: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    ids: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    id_offsets: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    labels: dict[str, int] = field(default_factory=dict)
    settings: dict[str, int | float | bool] | None = None

    def __len__(self) -> int:
        return len(self.line)


class Container(Enum):
    """How lines hold fields."""

    CSV = "csv"
    JSONL = "jsonl"


@dataclass(frozen=True)
class TraceFormat:
    """One format of trace files: its fields, and which of them says what.

    `arrival` is in units of which `units_per_second` make a second. `prefix_ids` names the field
    with one id for each `granularity` tokens of the prompt; a format that tells the granularity,
    or whether ids go on over the output, in the file itself gives `prefix_layout`, which returns
    both.
    `sessions` makes the session column, int64 [n], -1 where unknown.
    `fails_with_no_output`: requests of 0 output tokens are failed ones, to skip and count;
    otherwise they are an error.
    """

    name: str
    container: Container
    fields: tuple[Field, ...]
    arrival: str
    prompt: str
    output: str
    units_per_second: int = 1
    prefix_ids: str | None = None
    granularity: int = 0
    prefix_layout: Callable[[Table, str], tuple[int, bool]] | None = None
    sessions: Callable[[Table, str], NDArray[np.int64]] | None = None
    fails_with_no_output: bool = True


class BadValue(Exception):
    """A value that its field cannot take; the message is the problem, without the place."""


_INTEGER = re.compile(r"[+-]?\d{1,30}(?:\.0*)?", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?", re.ASCII)
_DATETIME = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?"
    r"(?:Z|([+-])(\d\d):?(\d\d))?",
    re.ASCII,
)
_EPOCH_DAY = date(1970, 1, 1).toordinal()


def shown(value: object) -> str:
    """A value as messages quote it: one line, never long."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def count_from_text(text: str) -> int:
    """A token count; "12.0", which spreadsheets make of 12 beside an empty cell, is 12."""
    if not _INTEGER.fullmatch(text):
        raise BadValue(_wrong(text, "a whole number of tokens"))
    return _checked_count(int(text.partition(".")[0]))


def count_from_json(value: object) -> int:
    """A token count; 12.0 is 12, true is not 1."""
    if type(value) is int:
        return _checked_count(value)
    if type(value) is float and value.is_integer():
        return _checked_count(int(value))
    raise BadValue(_wrong(value, "a whole number of tokens"))


def _checked_count(count: int) -> int:
    if count < 0:
        raise BadValue(f"{shown(count)} is negative, not a number of tokens")
    if count > MAX_TOKENS:
        raise BadValue(f"{shown(count)} is more than any request has (at most {MAX_TOKENS})")
    return count


def number_from_text(text: str) -> float:
    """A time."""
    if not _NUMBER.fullmatch(text):
        raise BadValue(_wrong(text, "a number"))
    return _checked_time(float(text))


def number_from_json(value: object) -> float:
    """A time."""
    if type(value) is not int and type(value) is not float:
        raise BadValue(_wrong(value, "a number"))
    return _checked_time(value)


def _checked_time(value: float) -> float:
    if not -MAX_TIME <= value <= MAX_TIME:  # also refuses nan
        raise BadValue(f"{shown(value)} is not a time (at most {MAX_TIME:.0e})")
    return float(value)


def nanoseconds_from_text(text: str) -> int:
    """A date and time, as nanoseconds since 1970."""
    found = _DATETIME.fullmatch(text)
    if not found:
        raise BadValue(_wrong(text, "a date and time like 2023-11-16 18:17:03.9799600"))
    year, month, day, hour, minute, second = map(int, found.group(1, 2, 3, 4, 5, 6))
    fraction, sign, zone_hour, zone_minute = found.group(7, 8, 9, 10)
    try:
        days = date(year, month, day).toordinal() - _EPOCH_DAY
    except ValueError:
        raise BadValue(f"{shown(text)} is not a date") from None
    if hour > 23 or minute > 59 or second > 59 or not 1700 <= year <= 2200:
        raise BadValue(f"{shown(text)} is not a date and time")
    seconds = ((days * 24 + hour) * 60 + minute) * 60 + second
    if sign:
        shift = int(zone_hour) * 3600 + int(zone_minute) * 60
        seconds += shift if sign == "-" else -shift
    return seconds * 10**9 + int((fraction or "0").ljust(9, "0"))


def _wrong(value: object, wanted: str) -> str:
    if value is None or value == "":
        return f"is empty, should be {wanted}"
    return f"{shown(value)} is not {wanted}"


def missing(name: str, file: str, line: int) -> TraceError:
    """The error for a field that must be there."""
    return TraceError("is missing", file=file, line=line, field=name)
