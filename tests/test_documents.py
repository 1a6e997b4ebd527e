"""The README and the pages of `docs/` say what is true: their code runs, their links lead on."""

from __future__ import annotations

import ast
import doctest
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
EXPECTED = "# -> "


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def code_blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    fence = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return fence.findall(page.read_text(encoding="utf-8"))


def run_block(source: str, names: dict[str, Any], place: str) -> None:
    """Run a block; a line that ends with `# -> text` must have a value whose repr is `text`."""
    lines = source.splitlines()
    for statement in ast.parse(source).body:
        last_line = lines[(statement.end_lineno or 1) - 1]
        code = ast.unparse(statement)
        if EXPECTED in last_line:
            assert isinstance(statement, ast.Expr), f"{place}: {last_line!r} is no expression"
            expected = last_line.partition(EXPECTED)[2].strip()
            assert repr(eval(code, names)) == expected, f"{place}: {last_line!r}"
        else:
            exec(code, names)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_on_a_page_runs_and_gives_what_the_page_says(page: Path) -> None:
    names: dict[str, Any] = {}
    for number, source in enumerate(code_blocks(page, "python"), start=1):
        place = f"{name_of(page)}, Python block {number}"
        if ">>>" in source:
            test = doctest.DocTestParser().get_doctest(source, names, place, str(page), 0)
            report: list[str] = []
            doctest.DocTestRunner(verbose=False).run(test, out=report.append, clear_globs=False)
            assert not report, "".join(report)
            names.update(test.globs)
        else:
            run_block(source, names, place)


def test_the_readme_shows_the_library_and_a_prefix_that_is_found() -> None:
    shown = [b for b in code_blocks(ROOT / "README.md", "python") if "KVCacheManager(" in b]
    assert any(".commit(" in block and "num_cached_tokens" in block for block in shown)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_who_builds_an_engine_is_led_to_memory_attention_and_the_example(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for place in ("memory.md)", "attention.md)", "examples/own_engine.py"):
        assert place in text, f"{page} does not name {place}"


@pytest.mark.parametrize("package", ["memory", "attention", "scheduling", "simulate"])
def test_the_reference_has_each_package_that_needs_no_torch(package: str) -> None:
    assert f"\n::: pagedkv.{package}\n" in (ROOT / "docs/reference.md").read_text("utf-8")


def test_the_map_for_contributors_has_every_package() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for init in (ROOT / "src/pagedkv").glob("*/__init__.py"):
        assert f"\n  {init.parent.name}/ " in text, f"no {init.parent.name} on the map"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_other_files_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s#]+)", prose):
        if not target.startswith(("https://", "mailto:")):
            assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_says_to_make_can_be_made(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for block in code_blocks(page, "sh"):
        for target in re.findall(r"^make ([a-z-]+)", block, re.MULTILINE):
            assert target in targets, f"{name_of(page)} says make {target}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in PAGES:
        if page.is_relative_to(ROOT / "docs"):
            assert page.relative_to(ROOT / "docs").as_posix() in navigation, name_of(page)
