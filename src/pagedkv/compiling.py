"""Where compiled code comes from and where it is kept.

Hot loops are Python functions that Numba compiles. `compiled` is the only place that decides
how: every compiled function of the package goes through it.

Numba's own cache looks at nothing but the file of the function that it caches, so a cached
caller keeps the old code of a callee that changed in another file. Here the cache folder is
named by a digest of *all* sources of the package, which makes stale code impossible; folders
of other versions are left alone, since another environment may be using them.

Set `PAGEDKV_CACHE_DIR` to keep compiled code elsewhere than in the user's cache folder, and
`NUMBA_DISABLE_JIT=1` to run every function uncompiled.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core import config, event
from numba.core.caching import CompileResultCacheImpl, FunctionCache

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGE = Path(__file__).parent


def compiled(function: F) -> F:
    """Compile `function` at its first call, or load it from the cache of compiled code.

    Division by zero gives inf or nan, as in NumPy, and integers wrap; nothing checks bounds
    unless `NUMBA_BOUNDSCHECK=1`.
    """
    dispatcher = numba.njit(error_model="numpy")(function)
    if not config.DISABLE_JIT:
        dispatcher._cache = _Cache(function)
    return cast(F, dispatcher)


@contextlib.contextmanager
def on_first_compilation(announce: Callable[[], None]) -> Iterator[None]:
    """Call `announce` once, when the first function inside the `with` must be compiled.

    Nothing happens while all code comes from the cache.
    """
    listener = _Announcer(announce)
    event.register("numba:compile", listener)
    try:
        yield
    finally:
        event.unregister("numba:compile", listener)


@functools.cache
def source_digest() -> str:
    """Digest of all Python sources of this package and of what else shapes compiled code."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    digest.update(f"{numba.__version__} {sys.version_info} {config.BOUNDSCHECK}".encode())
    return digest.hexdigest()[:16]


@functools.cache
def cache_folder() -> Path:
    """The folder that compiled code of exactly these sources is kept in."""
    given = os.environ.get("PAGEDKV_CACHE_DIR")
    if given:
        base = Path(given)
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pagedkv"
    folder = base / source_digest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:  # a home that cannot be written to: recompile once in each temporary folder
        folder = Path(tempfile.gettempdir()) / f"pagedkv-{os.getuid()}" / source_digest()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


class _Announcer(event.Listener):  # type: ignore[misc]
    def __init__(self, announce: Callable[[], None]) -> None:
        self._announce: Callable[[], None] | None = announce

    def on_start(self, event: Any) -> None:  # not reached when the code comes from the cache
        if self._announce is not None:
            announce, self._announce = self._announce, None
            announce()

    def on_end(self, event: Any) -> None:
        pass


class _Locator:
    """Tells Numba's cache the folder; the digest in its name makes a source stamp needless."""

    def __init__(self, py_func: Callable[..., Any], py_file: str) -> None:
        self._py_file = py_file
        self._line = py_func.__code__.co_firstlineno

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Locator:
        return cls(py_func, py_file)

    def get_cache_path(self) -> str:
        return str(cache_folder())

    def ensure_cache_path(self) -> None:
        cache_folder()

    def get_source_stamp(self) -> str:
        return source_digest()

    def get_disambiguator(self) -> str:
        return f"{hashlib.sha256(self._py_file.encode()).hexdigest()[:8]}-{self._line}"


class _CacheImpl(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = [_Locator]


class _Cache(FunctionCache):  # type: ignore[misc]
    _impl_class = _CacheImpl

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk costs the next start time, not this run
            super().save_overload(sig, data)
