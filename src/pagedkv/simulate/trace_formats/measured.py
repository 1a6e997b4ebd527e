"""The steps that lines of progress in a recording tell of: `"steps": {"took_us": [...], ...}`.

A list for each number, a place for each step: how long it took in microseconds, and how much it
computed and read. Recordings of before there was this have none.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from pagedkv.errors import TraceError
from pagedkv.simulate.measured_steps import MeasuredSteps
from pagedkv.simulate.step_time import MOST_S
from pagedkv.simulate.trace_formats.fields import MAX_TOKENS, shown

FIELD = "steps"

_LARGEST = {
    "took_us": int(1e6 * MOST_S),
    "prefill_tokens": MAX_TOKENS,
    "decode_tokens": MAX_TOKENS,
    "context_tokens": 2**53,
    "pairs": 2**62,
}
"""The lists, and the largest number in each."""


class StepLists:
    """Collects the steps of all lines of progress."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._columns = {name: array("q") for name in _LARGEST}

    def add(self, progress: dict[str, Any], line: int) -> None:
        """Take the steps of one line, if it has any. Raises TraceError for what cannot be."""
        steps = progress.get(FIELD)
        if steps is None:
            return

        def wrong(problem: str) -> TraceError:
            return TraceError(problem, file=self._file, line=line, field=FIELD)

        if not isinstance(steps, dict):
            raise wrong(f"{shown(steps)} is not an object of lists")
        lengths = set()
        for name, largest in _LARGEST.items():
            numbers = steps.get(name)
            if not isinstance(numbers, list):
                raise wrong(f"has no list {name}")
            least = 1 if name == "took_us" else 0
            for number in numbers:
                if type(number) is not int or not least <= number <= largest:
                    bounds = f"a whole number from {least} to {largest}"
                    raise wrong(f"{name} has {shown(number)}, not {bounds}")
            lengths.add(len(numbers))
        if len(lengths) > 1:
            raise wrong("has lists of different lengths")
        for name, column in self._columns.items():
            column.extend(steps[name])

    def found(self) -> MeasuredSteps | None:
        """All of them, in their order; None where there was none."""
        if not self._columns["took_us"]:
            return None
        columns = {name: np.array(column, np.int64) for name, column in self._columns.items()}
        return MeasuredSteps(took_s=columns.pop("took_us") / 1e6, **columns)


def lists_of(steps: MeasuredSteps) -> dict[str, list[int]]:
    """What `StepLists` makes these steps of."""
    took_us = np.round(1e6 * steps.took_s).astype(np.int64)
    others = {name: getattr(steps, name).tolist() for name in _LARGEST if name != "took_us"}
    return {"took_us": took_us.tolist(), **others}
