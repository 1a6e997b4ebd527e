"""Files that a command reads and writes: what is wrong with them, before anything slow begins."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pagedkv.errors import InvalidInput

STANDARD_STREAM = "-"
"""The path that stands for standard input where a file is read, for standard output elsewhere."""


def check_writable(option: str, path: str | None) -> None:
    """Find out now, and not after the simulation, that nothing can be written to `path`."""
    from pagedkv.simulate.whole_file import check_protection

    if path is None or path == STANDARD_STREAM:
        return
    if not path:
        raise InvalidInput(f"{option} is empty: name a file")
    try:
        target = Path(path).resolve()
        if target.is_dir():
            raise InvalidInput(f"{option} {path}: it is a directory, name a file in it")
        if target.is_file() or not target.exists():
            # Asking for permissions tells less: root has them all, on a disk that cannot be
            # written to as well.
            check_protection(target)
            tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise InvalidInput(
            f"{option} {path}: cannot be written: {error.strerror or error}; choose another path"
        ) from error


def refuse_overwriting(outputs: Mapping[str, str | None], inputs: Mapping[str, str | None]) -> None:
    """Raise `InvalidInput` where one file would be read and written, under whatever names.

    Both map what a person calls a path (`--json`, `TRACE`) to the path, None where there is none.
    Standard output is always one of the outputs.
    """
    written = [(f"{name} {path}", path) for name, path in outputs.items() if path is not None]
    for written_as, output in (*written, ("standard output", STANDARD_STREAM)):
        for name, source in inputs.items():
            if source is None:
                continue
            is_named = STANDARD_STREAM not in (output, source)
            status, read = _status(output, sys.__stdout__), _status(source, sys.__stdin__)
            if _is_one_file(status, read) or (is_named and same_file(output, source)):
                whence = f"what {name} comes from" if source == STANDARD_STREAM else name
                raise InvalidInput(f"{written_as}: it is {whence}, and read: choose another path")


def same_file(one: str, other: str) -> bool:
    """Whether two paths lead to one file, be it there or not."""
    return os.path.realpath(one) == os.path.realpath(other)


def _status(path: str, stream: object) -> os.stat_result | None:
    try:
        if path == STANDARD_STREAM:
            return os.fstat(stream.fileno())  # type: ignore[attr-defined]
        return os.stat(path)
    except (OSError, ValueError, AttributeError):  # not there, or closed
        return None


def _is_one_file(one: os.stat_result | None, other: os.stat_result | None) -> bool:
    if one is None or other is None or not stat.S_ISREG(one.st_mode):
        return False
    return os.path.samestat(one, other)
