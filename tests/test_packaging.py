"""What an installation promises: few imports, one version, a command."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pagedkv._version

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def loaded_after(statement: str) -> set[str]:
    """Names of all top-level modules that are loaded once `statement` has run."""
    done = run_python("-c", f"{statement}; import sys; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize(
    "module", ["pagedkv", "pagedkv.memory", "pagedkv.scheduling", "pagedkv.errors"]
)
def test_the_library_loads_neither_torch_nor_what_only_the_tools_need(module: str) -> None:
    loaded = loaded_after(f"import {module}")
    assert "pagedkv" in loaded
    assert not loaded & {"torch", "transformers", "polars", "plotly", "typer", "rich", "zstandard"}


def test_what_is_loaded_later_is_listed_for_completion_and_loads_nothing() -> None:
    done = run_python("-c", "import sys, pagedkv; print(*dir(pagedkv), 'numba' in sys.modules)")
    *listed, loaded = done.stdout.split()
    assert {"KVCacheManager", "Step", "NeverFits", "__version__"} <= set(listed)
    assert "Any" not in listed
    assert loaded == "False"


def test_the_simulator_does_not_load_torch() -> None:
    every_module = (
        "import importlib, pkgutil, pagedkv.simulate as package; "
        "[importlib.import_module(module.name) "
        "for module in pkgutil.walk_packages(package.__path__, 'pagedkv.simulate.')]"
    )
    loaded = loaded_after(every_module)
    assert "pagedkv" in loaded
    assert not loaded & {"torch", "transformers"}


def test_memory_names_nothing_but_numpy_numba_and_its_own() -> None:
    allowed = {"numpy", "numba"} | set(sys.stdlib_module_names)
    own = ("pagedkv.memory", "pagedkv.errors", "pagedkv.compiling")
    for path in sorted((ROOT / "src/pagedkv/memory").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module == "pagedkv":
                names = [f"pagedkv.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            for name in names:
                assert name.partition(".")[0] in allowed or name.startswith(own), (path, name)


def test_the_version_is_written_in_one_place_and_opens_the_changelog() -> None:
    version = pagedkv._version.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    assert PYPROJECT["tool"]["hatch"]["version"]["path"] == "src/pagedkv/_version.py"
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == version


def test_the_package_knows_its_version() -> None:
    assert pagedkv.__version__ == pagedkv._version.__version__


def test_a_plain_installation_brings_neither_torch_nor_a_server() -> None:
    needed = {re.split(r"[^\w-]", line)[0] for line in PYPROJECT["project"]["dependencies"]}
    assert needed == {"numpy", "numba", "polars", "typer", "rich", "plotly", "zstandard"}
    assert {"engine", "server"} <= set(PYPROJECT["project"]["optional-dependencies"])


def test_the_package_ships_its_type_information_and_licence() -> None:
    assert (ROOT / "src/pagedkv/py.typed").is_file()
    assert PYPROJECT["project"]["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_the_module_is_the_command() -> None:
    done = run_python("-m", "pagedkv", "--help")
    assert done.returncode == 0, done.stderr
    assert "simulate" in done.stdout
    assert "walkthrough" in done.stdout
    assert PYPROJECT["project"]["scripts"] == {"pagedkv": "pagedkv.cli.main:main"}
