"""Files that a command writes: whether it can, before anything slow begins."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pagedkv.errors import InvalidInput

STANDARD_OUTPUT = "-"


def check_writable(option: str, path: str | None) -> None:
    """Find out now, and not after the simulation, that nothing can be written to `path`."""
    if path is None or path == STANDARD_OUTPUT:
        return
    try:
        target = Path(path).resolve()
        if target.is_dir():
            raise InvalidInput(f"{option} {path}: it is a directory, name a file in it")
        if target.is_file() or not target.exists():
            # Asking for permissions tells less: root has them all, on a disk that cannot be
            # written to as well.
            tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise InvalidInput(
            f"{option} {path}: cannot be written: {error.strerror or error}; choose another path"
        ) from error


def same_file(one: str, other: str) -> bool:
    """Whether two paths lead to one file."""
    return os.path.realpath(one) == os.path.realpath(other)
