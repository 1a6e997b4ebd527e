"""From a path to plain bytes: opening, and undoing gzip and zstd, told apart by their first bytes.

Both kinds may come in several pieces behind each other, each of which is whole by itself (members
of gzip, frames of zstd). Of a file that ends within a piece the pieces before are told, and of that
one as much as comes out.

The name of a file says nothing here: a trace that was compressed and renamed, or comes through a
pipe, reads the same.
"""

from __future__ import annotations

import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import zstandard

from pagedkv.errors import TraceError

STANDARD_INPUT = "-"
"""The path that stands for standard input."""

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = tuple(bytes([low, 0x2A, 0x4D, 0x18]) for low in range(0x50, 0x60))
_LARGEST_ZSTD_WINDOW = 1 << 31  # what `zstd --long=31` writes; the library's default refuses it


def display_name(path: str) -> str:
    """How messages call the file: one line, whatever characters its name has."""
    if path == STANDARD_INPUT:
        return "standard input"
    return path if path.isprintable() else repr(path)


def trace_name(path: str) -> str:
    """How reports call the trace: the file's name without its folders."""
    name = display_name(path)
    return name if path == STANDARD_INPUT else Path(name).name or name


@dataclass(frozen=True)
class Content:
    """What a file holds, decompressed."""

    data: bytes
    num_cut_bytes: int = 0
    """Bytes at the end of a compressed file that begin a piece and do not end it; not in `data`."""
    cut_data: bytes = b""
    """What these hold, as far as it comes out."""
    kind: str = ""
    """The compression."""

    def cut_off(self, file: str) -> TraceError:
        """The error for a file of which nothing may be missing."""
        problem = f"the {self.kind} data is cut off: fetch or copy the file again"
        return TraceError(problem, file=file)


def read_decompressed(path: str) -> Content:
    """Read everything at `path` ("-": standard input), and undo gzip or zstd where there is any.

    Raises TraceError where it cannot be opened or read, or is damaged.
    """
    raw = _read(path)
    try:
        if raw.startswith(_GZIP_MAGIC):
            return _gunzip(raw)
        if raw.startswith(_ZSTD_MAGIC) or raw.startswith(_ZSTD_SKIPPABLE):
            return _unzstd(raw)
    except (zlib.error, zstandard.ZstdError) as error:
        kind = "gzip" if raw.startswith(_GZIP_MAGIC) else "zstd"
        problem = f"the {kind} data is damaged: fetch or copy the file again"
        raise TraceError(problem, file=display_name(path)) from error
    return Content(raw)


def _read(path: str) -> bytes:
    if path == STANDARD_INPUT and (sys.stdin is None or sys.stdin.closed):
        raise TraceError("is closed: nothing can be read from it", file=display_name(path))
    try:
        return sys.stdin.buffer.read() if path == STANDARD_INPUT else Path(path).read_bytes()
    except FileNotFoundError as error:
        raise TraceError("no such file", file=display_name(path)) from error
    except IsADirectoryError as error:
        raise TraceError("is a folder, not a trace file", file=display_name(path)) from error
    except OSError as error:
        raise TraceError(
            f"cannot be read: {error.strerror or error}", file=display_name(path)
        ) from error
    except ValueError as error:  # a path with a NUL character
        raise TraceError("no such file", file=display_name(path)) from error


def _gunzip(content: bytes) -> Content:
    # By hand rather than gzip.decompress, which tells truncation from damage less well and
    # takes one member at a time through a file object.
    parts, part = [], b""
    rest = content
    while rest and (rest.startswith(_GZIP_MAGIC) or _GZIP_MAGIC.startswith(rest)):
        member = zlib.decompressobj(wbits=31)
        part = member.decompress(rest)
        if not member.eof:
            break
        parts.append(part)
        part = b""
        rest = member.unused_data.lstrip(b"\0")  # tapes and some tools pad with zeros
    else:
        if rest:
            raise zlib.error("bytes after the end")
    return Content(b"".join(parts), len(rest), part, "gzip")


def _unzstd(content: bytes) -> Content:
    # A stream reader would stop silently where the data does; a frame object knows its end.
    decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_ZSTD_WINDOW)
    parts, part = [], b""
    rest = content
    while rest:
        if rest.startswith(_ZSTD_SKIPPABLE):
            end = 8 + int.from_bytes(rest[4:8], "little")
            if len(rest) < max(end, 8):
                break
            rest = rest[end:]
            continue
        frame = decompressor.decompressobj()
        part = frame.decompress(rest)
        if not frame.eof:
            break
        parts.append(part)
        part = b""
        rest = frame.unused_data
    return Content(b"".join(parts), len(rest), part, "zstd")
