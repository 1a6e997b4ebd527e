"""Lines of JSON objects to a `Table`.

One pass of Python's own JSON decoder. Measured on the 3 MB Mooncake conversation trace it is done
before polars is imported, on 30 MB the two are within a factor of two, and there is one reading
of a line instead of two that must agree.
"""

from __future__ import annotations

import io
import json
import re
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from pagedkv.errors import TraceError
from pagedkv.simulate.trace_formats.fields import (
    BadValue,
    Field,
    Kind,
    Table,
    count_from_json,
    missing,
    number_from_json,
    shown,
)


def _not_a_number(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_not_a_number)
_HEX = re.compile(r"(?:0[xX])?[0-9a-fA-F]{1,128}", re.ASCII)


def object_of(line: bytes, file: str, number: int) -> dict[str, Any]:
    """The JSON object on one line, or a TraceError that says what is there instead."""
    try:
        found = _DECODER.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise TraceError("is not UTF-8 text", file=file, line=number) from error
    except json.JSONDecodeError as error:
        # Some messages end in "at" already.
        problem = f"is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        raise TraceError(problem, file=file, line=number) from error
    except (ValueError, RecursionError) as error:  # NaN, endless digits, endless nesting
        raise TraceError("is not JSON that a trace can have", file=file, line=number) from error
    if not isinstance(found, dict):
        problem = f"holds {shown(found)}, not a JSON object like {{...}}"
        raise TraceError(problem, file=file, line=number)
    return found


def objects_of(content: bytes, file: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number and the object of every line that is not blank."""
    for number, line in enumerate(io.BytesIO(content), start=1):
        if line.strip():
            yield number, object_of(line, file, number)


def read_jsonl(
    objects: Iterable[tuple[int, dict[str, Any]]], fields: tuple[Field, ...], file: str
) -> Table:
    """Read numbered objects; fields that are not asked for may hold anything."""
    lines = array("q")
    columns: dict[str, array[Any]] = {
        f.name: array("d" if f.kind is Kind.NUMBER else "q") for f in fields
    }
    present = {f.name: bytearray() for f in fields if f.optional}
    labels: dict[str, int] = {}
    ids = _Ids()
    settings: dict[str, int | float | bool] | None = None
    for number, found in objects:
        lines.append(number)
        for wanted in fields:
            name, kind = wanted.name, wanted.kind
            value = found.get(name)
            if wanted.optional:
                present[name].append(value is not None)
            elif name not in found or (value is None and kind is not Kind.LABEL):
                raise missing(name, file, number)
            try:
                if kind is Kind.IDS:
                    columns[name].append(ids.append(value))
                elif kind is Kind.LABEL:
                    columns[name].append(_label_code(value, labels))
                elif kind is Kind.SETTINGS:
                    if value is not None and settings is None:
                        settings = _settings(value)
                elif value is None:
                    columns[name].append(0)
                elif kind is Kind.COUNT:
                    columns[name].append(count_from_json(value))
                elif kind is Kind.NUMBER:
                    columns[name].append(number_from_json(value))
                else:
                    columns[name].append(_flag(value))
            except BadValue as bad:
                raise TraceError(str(bad), file=file, line=number, field=name) from None
    return Table(
        line=np.array(lines, np.int64),
        columns={name: np.array(column) for name, column in columns.items()},
        present={name: np.frombuffer(bytes(p), np.uint8) != 0 for name, p in present.items()},
        ids=np.array(ids.flat, np.uint64),
        id_offsets=np.array(ids.offsets, np.int64),
        labels=labels,
        settings=settings,
    )


class _Ids:
    """Collects the lists of prefix ids of all lines, flat.

    Integers are kept as they are. Hexadecimal keys may be wider than 64 bits, so each distinct
    one gets the next number; the two ways never mix, else a key could meet another's number.
    """

    def __init__(self) -> None:
        self.flat: array[int] = array("Q")
        self.offsets: array[int] = array("q", [0])
        self._numbers: dict[int, int] = {}
        self._type: type | None = None

    def append(self, value: object) -> int:
        """Add one line's list, or nothing for None; return how many ids it has."""
        if value is not None:
            self._extend(value)
        count = len(self.flat) - self.offsets[-1]
        self.offsets.append(len(self.flat))
        return count

    def _extend(self, value: object) -> None:
        if not isinstance(value, list):
            raise BadValue(f"{shown(value)} is not a list of ids")
        types = set(map(type, value))
        if not types:
            return
        if types != {int} and types != {str}:
            raise BadValue("ids must be whole numbers, or all of them hexadecimal strings")
        (found,) = types
        if self._type is None:
            self._type = found
        elif found is not self._type:
            raise BadValue("numbers and hexadecimal strings are mixed in one file")
        if found is int:
            try:
                self.flat.extend(value)
            except OverflowError:
                bad = next(v for v in value if not 0 <= v < 2**64)
                raise BadValue(
                    f"id {shown(bad)} is not in 0 to 2^64 - 1 (write wider keys in hexadecimal)"
                ) from None
        else:
            for text in value:
                if not _HEX.fullmatch(text):
                    raise BadValue(f"id {shown(text)} is not hexadecimal")
                key = int(text, 16)
                self.flat.append(self._numbers.setdefault(key, len(self._numbers)))


def _label_code(value: object, labels: dict[str, int]) -> int:
    if value is None:
        return -1
    if type(value) is not int and type(value) is not str:
        raise BadValue(f"{shown(value)} is neither a name nor a whole number")
    try:
        label = str(value)
    except ValueError:  # more digits than Python writes out
        raise BadValue("has too many digits") from None
    return labels.setdefault(label, len(labels))


def _flag(value: object) -> int:
    if value is not True and value is not False:
        raise BadValue(f"{shown(value)} is neither true nor false")
    return int(value)


def _settings(value: object) -> dict[str, int | float | bool]:
    if not isinstance(value, dict):
        raise BadValue(f"{shown(value)} is not an object of settings")
    for name, setting in value.items():
        if type(setting) not in (int, float, bool):
            raise BadValue(f"{name} is {shown(setting)}, not a number or true or false")
    return value
