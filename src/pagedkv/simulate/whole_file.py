"""Writing a file whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from pagedkv.errors import InvalidInput


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Put `content` at `path`, so that at any moment either the old or the new file is there.

    Written beside it under another name and renamed over it; whatever interrupts the writing,
    Ctrl-C included, the other name is removed. A link is followed; something that is no regular
    file (a pipe, /dev/stdout) is written to directly. Raises `InvalidInput` where the path cannot
    be written.
    """
    given = Path(path)
    try:
        target = given.resolve()
        if target.is_dir():
            raise InvalidInput(f"cannot write {given}: it is a directory, name a file in it")
        if target.exists() and not target.is_file():
            target.write_bytes(content)
            return
        unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
        try:
            unfinished.write_bytes(content)
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidInput(
            f"cannot write {given}: {error.strerror or error}; choose another path"
        ) from error
