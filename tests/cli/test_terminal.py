"""Bars and colours."""

from __future__ import annotations

from typing import Any

import pytest
from rich.text import Text

from pagedkv.cli.terminal import Bars, console_with
from pagedkv.simulate.table import plain_table


def test_bars_tell_one_thing_at_a_time() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.tasks: dict[int, list[Any]] = {}
            self.added = 0

        def add_task(self, what: str, total: float | None) -> int:
            self.added += 1
            self.tasks[self.added] = [what, total, 0.0]
            return self.added

        def update(self, task: int, completed: float) -> None:
            self.tasks[task][2] = completed

        def remove_task(self, task: int) -> None:
            del self.tasks[task]

    recorder = Recorder()
    bars = Bars(recorder)
    bars.wait("reading")
    assert list(recorder.tasks.values()) == [["reading", None, 0.0]]
    bars("paged", 0.25)
    bars("paged", 0.5)
    assert list(recorder.tasks.values()) == [["paged", 1.0, 0.5]]
    bars.wait("writing")
    assert list(recorder.tasks.values()) == [["writing", None, 0.0]]


def test_no_line_ends_in_spaces_where_nobody_sees_them(capsys: pytest.CaptureFixture[str]) -> None:
    console = console_with(True)
    table = plain_table()
    table.add_column("left")
    table.add_row("x")
    table.add_row("much wider")
    console.print(Text("words that wrap " * 9))
    console.print(table)
    console.print("a", "b", end="")
    out = capsys.readouterr().out
    assert out.endswith("\nmuch wider\na b")
    assert len(out.splitlines()) == 7
    assert all(line == line.rstrip() for line in out.splitlines())
