"""What something costs the engine that can be switched while the engine runs.

Two whole runs differ by several percent for other reasons. So one engine stays under one steady
load, and what is measured is switched between two of its steps: pairs of phases of a few tenths of
a second, one with and one without it, in an order drawn by lot. What is slow for longer than that
is slow for both of a pair.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

DRAWS = 5_000
"""Of a bootstrap."""

TRIMMED = 0.1
"""Of the pairs at either end that count for nothing: something else had the cores meanwhile."""

CLOCKS = ("wall_s", "thread_s", "process_s")
"""What a cost is told in, as in `Note`."""


class Note(NamedTuple):
    """The engine between two steps."""

    wall_s: float
    thread_s: float
    """Processor time of the thread that runs the steps."""
    process_s: float
    """Processor time of the whole process."""
    num_steps: int
    num_output_tokens: int
    num_tokens: int
    """Tokens computed, of prompts too."""


class Cost(NamedTuple):
    """By how much the same work takes longer, as a share, and where that lies in 95 % of draws."""

    share: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.share:+.2%} ({self.low:+.2%} to {self.high:+.2%})"


class Phases:
    """Switches what is measured, and notes how far the engine is after each step.

    `switch(is_on)` is called by the thread that runs the steps, between two of them. Phases last
    `shortest_s` to `longest_s`. Give `after_step` to
    `LLM.watch` behind all that is measured, so that it lies between two notes.
    """

    def __init__(
        self,
        switch: Callable[[bool], None],
        *,
        shortest_s: float,
        longest_s: float,
    ) -> None:
        self._switch = switch
        self._lengths_s = shortest_s, longest_s
        self._rng = random.Random(0)
        self._next: list[bool] = []
        self._length_s = self._began_s = 0.0
        self._last: Note | None = None
        self._is_over = False
        self._phases: list[tuple[bool, list[Note]]] = []

    def after_step(self, engine: Any) -> None:
        """Note the step that has just ended, and switch where a phase is over."""
        scheduler = engine.scheduler
        if self._is_over or (self._last and scheduler.num_steps == self._last.num_steps):
            return
        note = Note(
            time.perf_counter(),
            time.thread_time(),
            time.process_time(),
            scheduler.num_steps,
            engine._output_tokens,
            scheduler._totals["computed"],
        )
        self._last = note
        if self._phases:
            self._phases[-1][1].append(note)
        if note.wall_s - self._began_s >= self._length_s:
            if not self._next:  # both of a pair are as long
                self._next = self._rng.choice([[True, False], [False, True]])
                self._length_s = self._rng.uniform(*self._lengths_s)
            is_on = self._next.pop()
            self._switch(is_on)
            self._began_s = note.wall_s
            self._phases.append((is_on, [note]))

    def run(self, seconds: float) -> None:
        """Let it go on for so long; it can be read afterwards."""
        time.sleep(seconds)
        self._is_over = True

    def costs(self) -> tuple[int, dict[str, Cost]]:
        """The number of pairs, and the cost in each of `CLOCKS`."""
        pairs = list(zip(self._phases[::2], self._phases[1::2]))
        pairs = [pair for pair in pairs if all(len(notes) > 1 for _, notes in pair)]
        without, with_it = (
            np.array(
                [
                    np.subtract(notes[-1], notes[0])
                    for pair in pairs
                    for is_on, notes in pair
                    if is_on is wanted
                ]
            )
            for wanted in (False, True)
        )
        costs = {}
        for i, clock in enumerate(CLOCKS):
            windows = np.concatenate([without, with_it])
            usual_s = usual_of(windows[:, i], *windows[:, 3:].T)
            slower = np.log(with_it[:, i] / usual_s[len(pairs) :]) - np.log(
                without[:, i] / usual_s[: len(pairs)]
            )
            costs[clock] = cost_of(slower)
        return len(pairs), costs

    def pace(self) -> tuple[float, float]:
        """Output tokens in a second, and seconds a step, of all that counted."""
        spans = [np.subtract(notes[-1], notes[0]) for _, notes in self._phases if len(notes) > 1]
        wall_s, _, _, num_steps, num_output_tokens, _ = np.sum(spans, axis=0)
        return float(num_output_tokens / wall_s), float(wall_s / num_steps)


def usual_of(
    took_s: NDArray[np.float64],
    num_steps: NDArray[np.float64],
    num_output_tokens: NDArray[np.float64],
    num_tokens: NDArray[np.float64],
) -> NDArray[np.float64]:
    """What the work of each window takes on average, with or without, by a linear fit.

    The lot puts a few prompts more into one phase than into another, which is no cost of what is
    measured: steps, output tokens and the tokens of prompts explain most of a window's time.
    """
    work = np.stack([num_steps, num_output_tokens, num_tokens - num_output_tokens], axis=1)
    kept = np.ones(len(work), dtype=bool)
    for _ in range(5):
        rates, *_ = np.linalg.lstsq(work[kept], took_s[kept], rcond=None)
        off = np.log(took_s / np.maximum(work @ rates, 1e-9))
        off -= np.median(off)
        kept = np.abs(off) <= 3 * off[kept].std()
    return np.maximum(work @ rates, 1e-9)


def cost_of(slower: NDArray[np.float64]) -> Cost:
    """The trimmed mean of pairs' logarithms of ratios, and where it lies if pairs are redrawn."""
    draws = np.random.default_rng(0).choice(slower, (DRAWS, len(slower)))
    low, high = np.quantile(_trimmed_mean(draws), [0.025, 0.975])
    return Cost(*np.expm1([float(_trimmed_mean(slower)), low, high]).tolist())


def _trimmed_mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    cut = int(TRIMMED * values.shape[-1])
    middle: NDArray[np.float64] = np.sort(values)[..., cut : values.shape[-1] - cut].mean(-1)
    return middle
