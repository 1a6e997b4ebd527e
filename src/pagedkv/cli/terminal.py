"""The terminal: a console with or without colours, and bars for what takes long."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def console_with(colour: bool, *, stderr: bool = False) -> Console:
    """A console that never highlights by itself; NO_COLOR counts too.

    In a pipe or a file no line ends in spaces, with which Rich fills lines and cells.
    """
    from rich.console import Console

    class Trimmed(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            if self.is_terminal:
                super().print(*objects, **options)
                return
            with self.capture() as captured:
                super().print(*objects, **options)
            lines = captured.get().split("\n")
            self.file.write("\n".join(line.rstrip(" ") for line in lines))

    plain = not colour or bool(os.environ.get("NO_COLOR"))
    return Trimmed(color_system=None if plain else "auto", highlight=False, stderr=stderr)


class Bars:
    """One bar at a time, for what is being done now."""

    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._what = ""
        self._task = None

    def __call__(self, what: str, done: float) -> None:
        """`what` is done to the share `done`, 0 to 1."""
        self._show(what, total=1.0)
        self._progress.update(self._task, completed=done)

    def wait(self, what: str) -> None:
        """`what` takes as long as it takes."""
        self._show(what, total=None)

    def _show(self, what: str, *, total: float | None) -> None:
        if what != self._what:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._what = what
            self._task = self._progress.add_task(what, total=total)


@contextmanager
def progress(colour: bool) -> Iterator[Bars]:
    """Bars on standard error where that is a terminal, gone in the end."""
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    with Progress(
        TextColumn("{task.description:16}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console_with(colour, stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as drawn:
        yield Bars(drawn)
