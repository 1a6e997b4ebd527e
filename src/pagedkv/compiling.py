"""Where compiled code comes from and where it is kept.

Hot loops are Python functions that Numba compiles. `compiled` is the only place that decides
how: every compiled function of the package goes through it.

Numba's own cache looks at nothing but the file of the function that it caches, so a cached
caller keeps the old code of a callee that changed in another file. Here compiled code is named
by a digest of its module *and of all modules of the package that this imports, directly or not*,
which makes stale code impossible; code of other versions is left alone, since another
environment may be using it.

Set `PAGEDKV_CACHE_DIR` to keep compiled code elsewhere than in the user's cache folder, and
`NUMBA_DISABLE_JIT=1` to run every function uncompiled.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import pickle
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import config, event
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.ccallback import CFunc
from numba.core.serialize import dumps
from numba.extending import intrinsic
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGE = Path(__file__).parent
_IMPORT = re.compile(
    r"^\s*(?:from (pagedkv[\w.]*) import (\([^)]*\)|[^\n]*)|import (pagedkv[\w.]*))", re.MULTILINE
)


def compiled(function: F) -> F:
    """Compile `function` at its first call, or load it from the cache of compiled code.

    Division by zero gives inf or nan, as in NumPy, and integers wrap; nothing checks bounds
    unless `NUMBA_BOUNDSCHECK=1`.
    """
    if config.DISABLE_JIT:
        return function
    return cast(F, _dispatcher(_named_apart(function), _Cache))


def compiled_in_place(function: F) -> F:
    """`compiled` for functions that only work on the arrays they are given.

    Nothing in them counts references to arrays. Numba counts atomically, at every call and for
    every array, which costs a function that looks at a block more than the look does. One that
    makes an array does not compile; none may *return* an array or a tuple of them, which the
    caller would then release without it ever having been counted.
    """
    if config.DISABLE_JIT:
        return function
    return cast(F, _InPlace(_named_apart(function), _nrt=False))


def compiled_inline(function: F) -> F:
    """`compiled_in_place` for what inner loops call once a block: it becomes part of its caller.

    A pool is seven arrays, and an array is seven words: to pass them costs more than such a
    function does. Code grows with every call, so only for short ones.
    """
    if config.DISABLE_JIT:
        return function
    return cast(F, _InPlace(_named_apart(function), _nrt=False, forceinline=True))


class CompiledTask:
    """What threads run that are not Python's: they know no arguments but one address.

    `function` takes the numbers, int64, that lie there; `numbers_at` makes pointers of addresses
    among them. Nothing checks these, nothing can be raised: the caller has looked at all of it.
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function

    @functools.cached_property
    def address(self) -> int:
        """Where the compiled function is, once it has been compiled or loaded."""
        signature = types.void(types.CPointer(types.int64))
        options = {"nopython": True, "error_model": "numpy"}
        made = CFunc(
            _named_apart(self._function), (signature.args, signature.return_type), {}, options
        )
        made._cache = _CacheForTasks(self._function)
        made.compile()
        return int(made.address)

    @functools.cached_property
    def function(self) -> Callable[[int], None]:
        """What Python calls with the address of the numbers; the GIL is released meanwhile."""
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)


class _InPlace:
    """A function with two compiled forms: for compiled callers, and for Python ones.

    What Numba wraps around a function so that Python can call it, to unpack some twenty arrays,
    takes longer to compile than most functions here, and few of them are called from Python.
    """

    def __init__(self, function: Callable[..., Any], **options: bool) -> None:
        functools.update_wrapper(self, function)
        self.py_func = function
        self._options = options
        bare = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        self._for_compiled = _dispatcher(function, _CacheForCompiled, **options, **bare)

    @property
    def _numba_type_(self) -> Any:
        """What Numba takes this for when it finds it in a function that it compiles."""
        return self._for_compiled._numba_type_

    @functools.cached_property
    def for_python(self) -> Any:
        """The form that Python calls, a Numba dispatcher."""
        return _dispatcher(self.py_func, _Cache, **self._options)

    @property
    def signatures(self) -> Any:
        """What Python has called it with."""
        return self.for_python.signatures

    def __call__(self, *arguments: Any) -> Any:
        return self.for_python(*arguments)


def _named_apart(function: F) -> F:
    """Put into the function's name what tells it from others that the same lines made.

    Numba adds a number to names that is its own in each process only, and a linker goes by the
    name: of two forms that two processes compiled and a third loads, it would take one for both.
    """
    described = closed_over(function)
    if described:
        digest = hashlib.sha256(repr(described).encode()).hexdigest()[:16]
        function.__qualname__ += f"_{digest}"
    return function


def _dispatcher(function: Callable[..., Any], cache: type[_Cache], **options: bool) -> Any:
    dispatcher = numba.njit(error_model="numpy", **options)(function)
    if Path(function.__code__.co_filename).exists():
        dispatcher._cache = cache(function)
    return dispatcher


if config.DISABLE_JIT:

    def prefetch(array: NDArray[Any], place: int) -> None:
        """Ask for `array[place]`, of one dimension, to be in the cache soon. Changes nothing."""

    def numbers_at(address: int, KIND: str) -> Any:
        """A pointer to the numbers of a dtype, by its name, at an address: for `numba.carray`."""
        return ctypes.cast(int(address), ctypes.POINTER(np.ctypeslib.as_ctypes_type(KIND)))

else:

    @intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
    def numbers_at(typing_context: Any, address: Any, KIND: Any) -> Any:
        """A pointer to the numbers of a dtype, by its name, at an address: for `numba.carray`."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(getattr(types, KIND.literal_value))(types.int64, KIND), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def prefetch(typing_context: Any, array: Any, place: Any) -> Any:
        """Ask for `array[place]`, of one dimension, to be in the cache soon. Changes nothing."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
            address = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
            function = builder.module.declare_intrinsic(
                "llvm.prefetch",
                [byte],
                ir.FunctionType(ir.VoidType(), [byte, word, word, word]),
            )
            # For writing, to be kept in every level, of data.
            builder.call(function, [address, word(1), word(3), word(1)])
            return context.get_dummy_value()

        return types.void(array, place), generate


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


def closed_over(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Names and values that a function takes from the one it was made in, all the way down."""
    described = []
    for cell in function.__closure__ or ():
        value = cell.cell_contents
        inner = getattr(value, "py_func", None)
        if inner is not None:
            value = (inner.__qualname__, source_digest(inner.__code__.co_filename))
            value += closed_over(inner)
        elif not isinstance(value, (bool, int, float, str)):
            raise TypeError(f"{function.__qualname__} closes over {value!r}: only constants may be")
        described.append(value)
    return tuple(described)


@functools.cache
def source_digest(file: str) -> str:
    """Digest of a module's source, of all it imports from this package, and of the compiler."""
    digest = hashlib.sha256()
    for path in sorted(_with_imports(Path(file))):
        digest.update(os.path.relpath(path, _PACKAGE).encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    digest.update(f"{numba.__version__} {sys.version_info} {config.BOUNDSCHECK}".encode())
    return digest.hexdigest()[:16]


def _with_imports(start: Path) -> set[Path]:
    found: set[Path] = set()
    waiting = [start]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _imports(path)
    return found


@functools.cache
def _imports(path: Path) -> list[Path]:
    """The files of this package that the module in `path` imports, wherever in it."""
    files = []
    for match in _IMPORT.finditer(path.read_text(encoding="utf-8")):
        package, names, module = match.groups()
        modules = [package, *(f"{package}.{name}" for name in re.findall(r"\w+", names or ""))]
        for dotted in modules if package else [module]:
            place = _PACKAGE.joinpath(*dotted.split(".")[1:])
            files += [f for f in (place.with_suffix(".py"), place / "__init__.py") if f.exists()]
    return files


@functools.cache
def cache_folder() -> Path:
    """The folder that compiled code is kept in."""
    given = os.environ.get("PAGEDKV_CACHE_DIR")
    if given:
        folder = Path(given)
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pagedkv"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:  # a home that cannot be written to
        folder = Path(tempfile.gettempdir()) / f"pagedkv-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
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
    """Tells Numba's cache the folder and the names of files in it."""

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
        return source_digest(self._py_file)

    def get_disambiguator(self) -> str:
        return f"{source_digest(self._py_file)}-{self._line}"


class _LocatorForCompiled(_Locator):
    def get_disambiguator(self) -> str:
        return super().get_disambiguator() + "-bare"


class _LocatorForTasks(_Locator):
    def get_disambiguator(self) -> str:
        return super().get_disambiguator() + "-task"


class _CacheImpl(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = [_Locator]


class _CacheImplForCompiled(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = [_LocatorForCompiled]


class _CacheImplForTasks(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = [_LocatorForTasks]


class _CodeFiles:
    """Compiled code on disk: a file for each form, named by all that tells it from others.

    Numba numbers the files of a function and keeps an index of them. Two processes that compile
    two forms at once both take the next number, and may leave an index that leads from one form
    to the code of the other: attention for another head size, which writes where it must not.
    """

    def __init__(self, folder: str, base: str) -> None:
        self._folder = Path(folder)
        self._base = base

    def load(self, key: Any) -> Any:
        """What was saved under `key`; None if nothing was, or nothing that can be read."""
        try:
            return pickle.loads(self._path(key).read_bytes())
        except (OSError, EOFError, pickle.UnpicklingError):
            return None

    def save(self, key: Any, data: Any) -> None:
        """Keep `data` under `key`, whole or not at all."""
        path = self._path(key)
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            file.write(dumps(data))
        os.replace(file.name, path)

    def _path(self, key: Any) -> Path:
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:24]
        return self._folder / f"{self._base}.{digest}.nbc"


class _Cache(FunctionCache):  # type: ignore[misc]
    _impl_class: type[CompileResultCacheImpl] = _CacheImpl

    def __init__(self, py_func: Callable[..., Any]) -> None:
        super().__init__(py_func)
        self._cache_file = _CodeFiles(self._cache_path, self._impl.filename_base)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """What tells one compiled form of a function from another.

        The folder and the file name tell the source. What is left is what the function closes
        over: constants by value, and compiled functions by their own source and constants, since
        Numba's own description of those is another in each process.
        """
        return sig, codegen.magic_tuple(), closed_over(self._py_func)

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk costs the next start time, not this run
            super().save_overload(sig, data)


class _CacheForCompiled(_Cache):
    _impl_class = _CacheImplForCompiled


class _CacheForTasks(_Cache):
    _impl_class = _CacheImplForTasks
