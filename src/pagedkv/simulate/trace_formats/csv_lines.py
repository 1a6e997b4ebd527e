"""Comma-separated lines under a header to a `Table`.

Two passes that agree. `_line_by_line` is the one that decides what is right: it reads what a trace
may hold and names the line and the field of what it may not. `_in_bulk` hands a large and
flawless file to polars, five times faster on the 1.4 million requests of BurstGPT, and declines
whatever it is not sure about.
"""

from __future__ import annotations

import csv
import io
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from pagedkv.errors import TraceError
from pagedkv.simulate.trace_formats.fields import (
    MAX_TIME,
    MAX_TOKENS,
    BadValue,
    Field,
    Kind,
    Table,
    count_from_text,
    missing,
    nanoseconds_from_text,
    number_from_text,
)

BULK_BYTES = 4 << 20
"""Files from this size on are read in bulk; below it, loading polars alone takes longer."""


def columns_of(line: bytes, file: str, number: int) -> list[str]:
    """The fields on one line, without the spaces around them."""
    try:
        text = line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise TraceError("is not UTF-8 text", file=file, line=number) from error
    if '"' not in text:
        return [part.strip() for part in text.split(",")]
    try:
        rows = list(csv.reader([text], strict=True))
    except csv.Error as error:
        raise TraceError(f"is not csv: {error}", file=file, line=number) from error
    return [part.strip() for row in rows for part in row]


def read_csv(content: bytes, fields: tuple[Field, ...], file: str) -> Table:
    """Read every line that is not blank; columns that are not asked for may hold anything."""
    if len(content) >= BULK_BYTES:
        table = _in_bulk(content, fields)
        if table is not None:
            return table
    return _line_by_line(content, fields, file)


def _line_by_line(content: bytes, fields: tuple[Field, ...], file: str) -> Table:
    lines = array("q")
    columns: dict[str, array[Any]] = {
        f.name: array("d" if f.kind is Kind.NUMBER else "q") for f in fields
    }
    labels: dict[str, int] = {}
    header: list[str] | None = None
    wanted: list[tuple[int, str, Callable[[str], float]]] = []
    for number, line in enumerate(io.BytesIO(content), start=1):
        if not line.strip():
            continue
        parts = columns_of(line, file, number)
        if header is None:
            header = parts
            wanted = [
                (header.index(f.name), f.name, _converter(f.kind, labels))
                for f in fields
                if _in_header(f, header, file, number)
            ]
            continue
        if len(parts) != len(header):
            problem = f"has {len(parts)} fields, the header has {len(header)}"
            raise TraceError(problem, file=file, line=number)
        lines.append(number)
        for place, name, convert in wanted:
            try:
                columns[name].append(convert(parts[place]))
            except BadValue as bad:
                raise TraceError(str(bad), file=file, line=number, field=name) from None
    return _table(fields, np.array(lines, np.int64), columns, labels)


def _in_header(field: Field, header: list[str], file: str, number: int) -> bool:
    if header.count(field.name) > 1:
        raise TraceError("stands twice in the header", file=file, line=number, field=field.name)
    if field.name not in header and not field.optional:
        raise missing(field.name, file, number)
    return field.name in header


def _converter(kind: Kind, labels: dict[str, int]) -> Callable[[str], float]:
    if kind is Kind.COUNT:
        return count_from_text
    if kind is Kind.NUMBER:
        return number_from_text
    if kind is Kind.DATETIME:
        return nanoseconds_from_text
    return lambda text: labels.setdefault(text, len(labels)) if text else -1


def _table(
    fields: tuple[Field, ...], lines: Any, columns: dict[str, Any], labels: dict[str, int]
) -> Table:
    n = len(lines)
    filled = {
        f.name: np.array(columns[f.name])
        if len(columns[f.name]) == n
        else np.full(n, -1 if f.kind is Kind.LABEL else 0, np.int64)  # optional, and not there
        for f in fields
    }
    present = {f.name: np.full(n, len(columns[f.name]) == n) for f in fields if f.optional}
    return Table(line=lines, columns=filled, present=present, labels=labels)


def _in_bulk(content: bytes, fields: tuple[Field, ...]) -> Table | None:
    """What `_line_by_line` returns for the same file, or None: then that one must decide."""
    import polars as pl  # not at the top: most runs never need it, and it takes 0.2 s to load

    header = content[: content.find(b"\n")].decode("utf-8", "replace").strip().split(",")
    n = content.rstrip().count(b"\n")
    # Quotes could hide commas. Every line has as many fields as the header: polars refuses more,
    # and fewer would show in the sum.
    if b'"' in content or content.count(b",") != (n + 1) * (len(header) - 1):
        return None
    if any(name != name.strip() for name in header):
        return None
    wanted = [f for f in fields if f.name in header]
    if any(header.count(f.name) != 1 for f in fields if not f.optional or f.name in header):
        return None
    try:
        # Everything as text first: polars' own guesses depend on the first lines of a file.
        text = pl.read_csv(
            content, columns=[f.name for f in wanted], infer_schema=False, quote_char=None
        ).select(pl.col(f.name).str.strip_chars() for f in wanted)
        columns: dict[str, Any] = {}
        labels: dict[str, int] = {}
        for f in wanted:
            column = _bulk_column(text[f.name], f.kind, labels)
            if column is None:
                return None
            columns[f.name] = column
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
        return None
    if len(text) != n:  # blank lines between: rows no longer tell lines
        return None
    columns |= {f.name: np.zeros(0, np.int64) for f in fields if f not in wanted}
    return _table(fields, np.arange(2, n + 2), columns, labels)


def _bulk_column(text: Any, kind: Kind, labels: dict[str, int]) -> Any:
    import polars as pl

    if kind is Kind.LABEL:
        text = text.fill_null("")
        for label in text.unique(maintain_order=True).to_list():
            if label:
                labels.setdefault(label, len(labels))
        codes = pl.Series([*labels.values(), -1], dtype=pl.Int64)
        return text.replace_strict(pl.Series([*labels, ""]), codes).to_numpy()
    if kind is Kind.DATETIME:
        text = text.str.strip_suffix("+00:00")
        times = text.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="ns", strict=False)
        # Polars takes more than we do, and wraps around where nanoseconds overflow: only the plain
        # shape, in years that fit, is left to it.
        shape = text.str.contains(r"^(19|20)\d\d-\d\d-\d\d \d\d:\d\d:[0-5]\d(\.\d{1,9})?$")
        if times.null_count() or not shape.all():
            return None
        return times.cast(pl.Int64).to_numpy()
    if kind is Kind.COUNT:
        counts = text.cast(pl.Int64, strict=False)
        if counts.null_count() or not counts.is_between(0, MAX_TOKENS).all():
            return None
        return counts.to_numpy()
    numbers = text.cast(pl.Float64, strict=False)
    if numbers.null_count() or not numbers.is_between(-MAX_TIME, MAX_TIME).all():
        return None
    return numbers.to_numpy()
