"""From a path to plain bytes: opening, and undoing gzip and zstd, told apart by their first bytes.

The name of a file says nothing here: a trace that was compressed and renamed, or comes through a
pipe, reads the same.
"""

from __future__ import annotations

import sys
import zlib
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


def read_decompressed(path: str) -> bytes:
    """Read everything at `path` ("-": standard input), and undo gzip or zstd where there is any.

    Raises TraceError where it cannot be opened or read, or is damaged or cut off.
    """
    content = _read(path)
    try:
        if content.startswith(_GZIP_MAGIC):
            return _gunzip(content)
        if content.startswith(_ZSTD_MAGIC) or content.startswith(_ZSTD_SKIPPABLE):
            return _unzstd(content)
    except (zlib.error, zstandard.ZstdError, _CutOff) as error:
        kind = "gzip" if content.startswith(_GZIP_MAGIC) else "zstd"
        if isinstance(error, _CutOff):
            problem = f"the {kind} data is cut off: fetch or copy the file again"
        else:
            problem = f"the {kind} data is damaged: fetch or copy the file again"
        raise TraceError(problem, file=display_name(path)) from error
    return content


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


class _CutOff(Exception):
    """Compressed data that ends before its end mark."""


def _gunzip(content: bytes) -> bytes:
    # By hand rather than gzip.decompress, which tells truncation from damage less well and
    # takes one member at a time through a file object.
    parts = []
    rest = content
    while rest.startswith(_GZIP_MAGIC):
        member = zlib.decompressobj(wbits=31)
        parts.append(member.decompress(rest))
        if not member.eof:
            raise _CutOff
        rest = member.unused_data.lstrip(b"\0")  # tapes and some tools pad with zeros
    if rest:
        raise zlib.error("bytes after the end")
    return b"".join(parts)


def _unzstd(content: bytes) -> bytes:
    # A stream reader would stop silently where the data does; a frame object knows its end.
    decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_ZSTD_WINDOW)
    parts = []
    rest = content
    while rest:
        if rest.startswith(_ZSTD_SKIPPABLE):
            end = 8 + int.from_bytes(rest[4:8], "little")
            if len(rest) < max(end, 8):
                raise _CutOff
            rest = rest[end:]
            continue
        frame = decompressor.decompressobj()
        parts.append(frame.decompress(rest))
        if not frame.eof:
            raise _CutOff
        rest = frame.unused_data
    return b"".join(parts)
