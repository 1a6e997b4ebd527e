"""Compiled code: where it is kept, when it is stale, when it is announced."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from numba.core.errors import NumbaError

import pagedkv
from pagedkv import compiling
from pagedkv.compiling import compiled, compiled_in_place, prefetch

IS_COMPILED = os.environ.get("NUMBA_DISABLE_JIT", "0") == "0"

PROGRAM = textwrap.dedent(
    """
    import sys
    sys.path.insert(0, sys.argv[1])
    from pagedkv.compiling import on_first_compilation
    with on_first_compilation(lambda: print("compiling")):
        from pagedkv import caller
        print(caller.answer(1))
        print(caller.answer(1))
    """
)


def run(program: str, root: Path, cache: Path) -> list[str]:
    environment = {**os.environ, "PAGEDKV_CACHE_DIR": str(cache), "NUMBA_DISABLE_JIT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(root)],
        env=environment,
        check=True,
        text=True,
        capture_output=True,
    )
    return done.stdout.split()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with our name and our `compiling`, and two modules of which one calls the other."""
    root = tmp_path / "source" / "pagedkv"
    root.mkdir(parents=True)
    (root / "__init__.py").write_text("")
    source = Path(compiling.__file__).read_text()
    (root / "compiling.py").write_text(source)
    (root / "callee.py").write_text(
        "from pagedkv.compiling import compiled_in_place\n"
        "@compiled_in_place\ndef add(x):\n    return x + 1\n"
    )
    (root / "caller.py").write_text(
        "from pagedkv import callee\nfrom pagedkv.compiling import compiled\n"
        "@compiled\ndef answer(x):\n    return callee.add(x)\n"
    )
    (root / "stranger.py").write_text("")
    return root


def test_code_is_compiled_once_and_then_loaded(package: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert run(PROGRAM, package.parent, cache) == ["compiling", "2", "2"]
    assert run(PROGRAM, package.parent, cache) == ["2", "2"]


def test_an_edit_of_a_callee_in_another_file_is_seen(package: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    run(PROGRAM, package.parent, cache)
    callee = package / "callee.py"
    callee.write_text(callee.read_text().replace("x + 1", "x + 41"))
    assert run(PROGRAM, package.parent, cache) == ["compiling", "42", "42"]


def test_each_constant_that_is_closed_over_has_its_own_code_in_the_cache(
    package: Path, tmp_path: Path
) -> None:
    (package / "caller.py").write_text(
        "from pagedkv.compiling import compiled, compiled_in_place\n"
        "def make(n):\n"
        "    @compiled_in_place\n    def add(x):\n        return x + n\n"
        "    @compiled\n    def answer(x):\n        return add(x)\n"
        "    return answer\n"
    )
    for n in (1, 20, 300):
        ask = f"caller.answer = caller.make({n}); print(caller.answer(1))"
        program = PROGRAM.replace("print(caller.answer(1))", ask, 1)
        answer = str(n + 1)
        assert run(program, package.parent, tmp_path / "cache") == ["compiling", answer, answer]
        assert run(program, package.parent, tmp_path / "cache") == [answer, answer]


@pytest.mark.parametrize("kind", ["compiled", "task"])
def test_code_of_different_processes_is_not_taken_for_each_others_in_one(
    package: Path, tmp_path: Path, kind: str
) -> None:
    """Numba numbers functions within a process, and linkers go by name and number."""
    lines = "        x = (x * 31 + n) ^ (x >> 3)\n" * 80  # too many to become part of the caller
    (package / "caller.py").write_text(
        "import ctypes\n"
        "from pagedkv.compiling import CompiledTask, compiled, compiled_in_place\n"
        "def make(n, kind):\n"
        f"    @compiled_in_place\n    def inner(x):\n{lines}        return x * 1000 + n\n"
        "    @compiled\n    def answer(x):\n        return inner(x)\n"
        "    def store(numbers):\n        numbers[0] = inner(numbers[0])\n"
        "    if kind == 'compiled':\n        return answer\n"
        "    def run(x):\n"
        "        numbers = (ctypes.c_int64 * 1)(x)\n"
        "        CompiledTask(store).function(ctypes.addressof(numbers))\n"
        "        return numbers[0]\n"
        "    return run\n"
    )
    program = "import sys; sys.path.insert(0, sys.argv[1])\nfrom pagedkv.caller import make\n"
    alone: list[str] = []
    for n in (1, 20, 300):
        call = f"print(make({n}, {kind!r})(1))"
        alone += run(program + call, package.parent, tmp_path / "cache")
    every = f"print(*(make(n, {kind!r})(1) for n in (1, 20, 300)))"
    assert len(set(alone)) == 3
    assert run(program + every, package.parent, tmp_path / "cache") == alone


@pytest.mark.skipif(not IS_COMPILED, reason="NUMBA_DISABLE_JIT=1")
def test_two_processes_that_compile_at_once_do_not_get_each_others_code(tmp_path: Path) -> None:
    one, other = (compiling._CodeFiles(str(tmp_path), "kernel") for _ in range(2))
    assert one.load(("float32", 64)) is other.load(("float32", 128)) is None
    one.save(("float32", 64), "code for 64")
    other.save(("float32", 128), "code for 128")  # neither has seen that the other began
    for files in (one, other):
        assert files.load(("float32", 64)) == "code for 64"
        assert files.load(("float32", 128)) == "code for 128"
    assert len(list(tmp_path.iterdir())) == 2


def test_code_that_cannot_be_read_is_compiled_again(tmp_path: Path) -> None:
    files = compiling._CodeFiles(str(tmp_path), "kernel")
    files.save("key", "code")
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    assert files.load("key") is None


def test_only_constants_and_compiled_functions_may_be_closed_over() -> None:
    constants = [1, 2]

    def answer(x: int) -> int:
        return constants[x]

    with pytest.raises(TypeError, match="only constants may be"):
        compiled(answer)


def test_an_edit_of_a_module_that_nothing_imports_costs_nothing(
    package: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    run(PROGRAM, package.parent, cache)
    (package / "stranger.py").write_text("x = 1\n")
    assert run(PROGRAM, package.parent, cache) == ["2", "2"]


def test_a_cache_folder_that_cannot_be_made_is_replaced(package: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert run(PROGRAM, package.parent, tmp_path / "file" / "cache")[-1] == "2"


def test_the_digest_covers_everything_that_the_replay_is_made_of() -> None:
    root = Path(pagedkv.__file__).parent
    covered = compiling._with_imports(root / "simulate" / "paged.py")
    names = {path.relative_to(root).as_posix() for path in covered}
    assert {
        "memory/prefix_cache.py",
        "memory/block_pool.py",
        "memory/blocks.py",
        "memory/copy_on_write.py",
        "scheduling/scheduler.py",
        "simulate/step_time.py",
    } <= names


@compiled_in_place
def double_first(values: np.ndarray) -> int:
    """Used below from Python and from compiled code."""
    prefetch(values, 0)
    values[0] *= 2
    return int(values[0])


@compiled
def double_first_twice(values: np.ndarray) -> int:
    """Calls the function above."""
    double_first(values)
    return double_first(values)


def test_a_function_in_place_is_called_from_python_and_from_compiled_code() -> None:
    values = np.array([3], dtype=np.int64)
    assert double_first(values) == 6
    assert double_first_twice(values) == 24
    assert values.tolist() == [24]


@pytest.mark.skipif(not IS_COMPILED, reason="NUMBA_DISABLE_JIT=1")
def test_a_function_in_place_that_makes_an_array_does_not_compile() -> None:
    @compiled_in_place
    def make(n: int) -> int:
        return len(np.empty(n))

    with pytest.raises(NumbaError):
        make(3)
