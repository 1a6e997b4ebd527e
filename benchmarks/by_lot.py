"""What something costs the engine that is done now and then, between two steps.

Each time it is due, a lot says whether it is done or left out. Steps from there on are compared
with those just before, and these differences, of where it was done, with those of where it was
not. A machine that is slower for seconds is so on both sides, and whatever is special about the
steps at which it is due is the same for both.
"""

from __future__ import annotations

import random
import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from switching import DRAWS, usual_of

BEFORE, AFTER = 8, 6
"""Steps that are compared: whole ones before, and from the one that has the lot in it."""

FEWEST_WINDOWS = 100


class Cost(NamedTuple):
    """Seconds for each time, and where that lies in 95 % of draws."""

    each_s: float
    low_s: float
    high_s: float

    def share(self, per_second: float) -> str:
        """As a share of the time, done so often."""
        share, low, high = (seconds * per_second for seconds in self)
        return f"{share:+.2%} ({low:+.2%} to {high:+.2%})"


class ByLot:
    """Draws lots, and notes how long steps take.

    Give `after_step` to `LLM.watch` behind what is done, so that it lies between two notes.
    """

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self._drawn: bool | None = None
        self._notes: list[tuple[float, int, int, int]] = []
        self._lots: list[tuple[int, bool]] = []

    def draw(self) -> bool:
        """Whether it is to be done this time. In the engine's thread, before `after_step`."""
        self._drawn = self._rng.random() < 0.5
        return self._drawn

    def after_step(self, engine: Any) -> None:
        """Note the step that has just ended, and with it what was drawn meanwhile."""
        scheduler = engine.scheduler
        if self._notes and self._notes[-1][1] == scheduler.num_steps:
            return
        if self._drawn is not None and self._notes:
            self._lots.append((len(self._notes) - 1, self._drawn))
        self._drawn = None
        totals = scheduler._totals["computed"]
        self._notes.append(
            (time.perf_counter(), scheduler.num_steps, engine._output_tokens, totals)
        )

    def cost(self) -> tuple[int, Cost]:
        """How often it was done, and what it costs."""
        took_s, *work = np.diff(np.array(self._notes), axis=0).T
        usual_s = usual_of(took_s, *work)
        # Of what is usual for its work; a step that is several times as long was kept waiting.
        pace = np.minimum(took_s / usual_s, 3.0)
        found: dict[bool, list[float]] = {True: [], False: []}
        for step, was_done in self._lots:
            if BEFORE <= step <= len(pace) - AFTER:
                here = slice(step, step + AFTER)
                base = np.median(pace[step - BEFORE : step])
                found[was_done].append(float(((pace[here] - base) * usual_s[here]).sum()))
        if min(map(len, found.values())) < FEWEST_WINDOWS:
            raise SystemExit("too few steps to tell a cost from")
        draws = np.random.default_rng(0)
        without, with_it = np.array(found[False]), np.array(found[True])
        spread = _means(draws, with_it) - _means(draws, without)
        low_s, high_s = np.quantile(spread, [0.025, 0.975])
        each_s = with_it.mean() - without.mean()
        return len(with_it), Cost(float(each_s), float(low_s), float(high_s))

    @property
    def step_s(self) -> float:
        """Seconds a step."""
        return (self._notes[-1][0] - self._notes[0][0]) / (len(self._notes) - 1)


def _means(draws: np.random.Generator, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means of so many values as there are, redrawn."""
    found: NDArray[np.float64] = draws.choice(values, (DRAWS, len(values))).mean(-1)
    return found
