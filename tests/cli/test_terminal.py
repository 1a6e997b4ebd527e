"""Bars and colours."""

from __future__ import annotations

from typing import Any

from pagedkv.cli.terminal import Bars


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
