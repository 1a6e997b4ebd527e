"""Writing files whole or not at all, several of them together."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pagedkv.errors import InvalidInput


def write_together(contents: Mapping[str | os.PathLike[str], bytes]) -> None:
    """Put each content at its path: all of the files are new in the end, or all as they were.

    Each is written beside its place under another name, and all are renamed when all are whole;
    whatever interrupts the writing, Ctrl-C included, the other names are removed. Links are
    followed, and a file that was there passes its permissions on. Something that is no regular
    file (a pipe, /dev/stdout) is written to directly. Raises `InvalidInput` where a path cannot be
    written, be it that the file there is protected.
    """
    whole: list[tuple[Path, Path, Path]] = []
    direct: list[tuple[Path, Path, bytes]] = []
    try:
        for path, content in contents.items():
            given = Path(path)
            with _named(given):
                target = given.resolve()
                if target.is_dir():
                    raise InvalidInput(
                        f"cannot write {given}: it is a directory, name a file in it"
                    )
                if target.exists() and not target.is_file():
                    direct.append((given, target, content))
                    continue
                check_protection(target)
                unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
                whole.append((given, target, unfinished))
                _write_beside(unfinished, target, content)
        for given, target, content in direct:
            with _named(given):
                target.write_bytes(content)
        with _uninterrupted():
            for given, target, unfinished in whole:
                with _named(given):
                    unfinished.replace(target)
    finally:
        for _, _, unfinished in whole:
            unfinished.unlink(missing_ok=True)


def check_protection(target: Path) -> None:
    """Raise `OSError` where there is a file that may not be written to; it is left as it is.

    Renaming over it would need no more than a folder that may be written to.
    """
    if target.exists():
        os.close(os.open(target, os.O_WRONLY))


def _write_beside(unfinished: Path, target: Path, content: bytes) -> None:
    if not target.exists():
        unfinished.write_bytes(content)
        return
    unfinished.touch(mode=0o600)  # nobody reads meanwhile what the old file was closed to
    unfinished.write_bytes(content)
    unfinished.chmod(stat.S_IMODE(target.stat().st_mode))


@contextmanager
def _named(given: Path) -> Iterator[None]:
    """Errors of the system as `InvalidInput` that names the path."""
    try:
        yield
    except OSError as error:
        raise InvalidInput(
            f"cannot write {given}: {error.strerror or error}; choose another path"
        ) from error


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block, which is short."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came = []
    signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt
