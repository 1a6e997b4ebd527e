"""The time of a step, fitted to the steps of a recorded run: the rates of that very machine.

A step takes a fixed time, and some more for each prompt token computed, each answer that goes on
by a token, each context token read and each pair that attends; none of these can be negative.
What is made least is the sum of the squared errors, each as a share of the step's own time, since
a long step is off by more than a short one. Errors beyond what is usual count as if they were
linear (Huber): a step during which the machine did something else, or compiled, has a say like
any other step and no more.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidInput
from pagedkv.simulate.measured_steps import MeasuredSteps
from pagedkv.simulate.metrics import show_number
from pagedkv.simulate.step_time import LEAST_STEP_S, StepTime

LEAST_STEPS = 50
"""With fewer than these, what the machine did besides is in the rates."""

MOST_STEPS = 100_000
"""Of a longer run, as many steps are looked at, spread over all of it."""

_TURNS = 50
_HUBER = 1.345
"""In standard deviations: where errors begin to count less. Loses 5 % where none is unusual."""

_TO_DEVIATION = 1.4826
"""A standard deviation in medians of what errors are off by, of normal ones."""

_SAME = 1e-9
"""Errors below these are those of numbers that are rounded."""

_NOTHING = 1e-12
"""Of the sum of squares of all steps: what another rate has to explain to be worth having."""

_CONDITION = 1e10
"""Of a matrix of products; beyond it two kinds of work went together in every step."""

_RATES = (
    ("", "base_s"),
    (" a prompt token", "prefill_token_s"),
    (" an answer token", "decode_token_s"),
    (" a context token read", "read_token_s"),
    (" a pair that attends", "pair_s"),
)


@dataclass(frozen=True)
class StepTimeFit:
    """Rates, and how well they tell the steps that they are from."""

    step_time: StepTime
    num_steps: int
    half_within: float
    """Half of the steps took no more and no less than this share beside what the rates say."""
    total: float
    """What the rates say of all steps together, as a share of what they took."""
    most_prefill_tokens: int
    most_decode_tokens: int
    """In one step: beyond these, times are extrapolated."""

    @property
    def in_words(self) -> str:
        """Where the times of steps are from, and how well they fit, one line."""
        off = 100 * (self.total - 1)
        together = (
            f"{abs(off):.0f} % {'less' if off < 0 else 'more'} than measured"
            if abs(off) >= 0.5
            else "as measured"
        )
        return (
            f"steps timed by this recording: {_rates_in_words(self.step_time)}; half of the "
            f"{self.num_steps:,} steps within {100 * self.half_within:.2g} %, all together "
            f"{together}; seen with up to {self.most_prefill_tokens:,} prompt and "
            f"{self.most_decode_tokens:,} answer tokens a step"
        )


def fitted_step_time(steps: MeasuredSteps) -> StepTimeFit:
    """The rates that tell these steps best.

    Raises `InvalidInput`, one line that tells why, where there are fewer than `LEAST_STEPS` or
    where all did the same work.
    """
    num_steps = len(steps)
    if num_steps < LEAST_STEPS:
        were = "1 step was" if num_steps == 1 else f"{num_steps} steps were"
        raise InvalidInput(f"{were} recorded, and it takes {LEAST_STEPS} to tell what one costs")
    chosen = np.arange(num_steps)
    if num_steps > MOST_STEPS:
        chosen = np.linspace(0, num_steps - 1, MOST_STEPS).astype(np.int64)
    work = np.stack(
        [
            np.ones(len(chosen)),
            steps.prefill_tokens[chosen],
            steps.decode_tokens[chosen],
            steps.context_tokens[chosen],
            steps.pairs[chosen],
        ],
        axis=1,
    ).astype(np.float64)
    if np.all(work == work[0]):
        raise InvalidInput(
            f"all {num_steps:,} recorded steps computed and read just as much: none tells what "
            "more would cost"
        )
    took_s = steps.took_s[chosen]
    rates = _robust_rates(work, took_s)
    told_s = work @ rates
    base_s, prefill_token_s, decode_token_s, read_token_s, pair_s = (float(r) for r in rates)
    step_time = StepTime(
        description="",
        base_s=max(base_s, LEAST_STEP_S),  # time always passes
        prefill_token_s=prefill_token_s,
        decode_token_s=decode_token_s,
        read_token_s=read_token_s,
        pair_s=pair_s,
    )
    return StepTimeFit(
        step_time=replace(
            step_time, description=f"fitted to this recording: {_rates_in_words(step_time)}"
        ),
        num_steps=num_steps,
        half_within=float(np.median(np.abs(_errors(told_s, took_s)))),
        total=float(told_s.sum() / took_s.sum()),
        most_prefill_tokens=int(steps.prefill_tokens.max()),
        most_decode_tokens=int(steps.decode_tokens.max()),
    )


def _robust_rates(work: NDArray[np.float64], took_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds for each kind of work, float64 [k], none negative; `work` float64 [n, k]."""
    largest = work.max(axis=0)
    largest[largest == 0] = 1.0
    work = work / largest  # tokens and pairs are millions apart
    weight = np.ones_like(took_s)
    rates = np.zeros(work.shape[1])
    for _ in range(_TURNS):
        before, rates = rates, _nonnegative_rates(work, took_s, weight)
        if np.allclose(rates, before, rtol=1e-7, atol=0.0):
            break
        told_s = np.maximum(work @ rates, LEAST_STEP_S)
        error = np.abs(_errors(told_s, took_s))
        usual = max(_HUBER * _TO_DEVIATION * float(np.median(error)), _SAME)
        weight = np.sqrt(usual / np.maximum(error, usual)) / told_s
    unscaled: NDArray[np.float64] = rates / largest
    return unscaled


def _errors(told_s: NDArray[np.float64], took_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """How much longer each step took, as a share of what is told."""
    off: NDArray[np.float64] = took_s / np.maximum(told_s, LEAST_STEP_S) - 1.0
    return off


def _nonnegative_rates(
    work: NDArray[np.float64], took_s: NDArray[np.float64], weight: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Least squares of weighted errors with no rate below 0, float64 [k].

    Where none may be negative, those that are not 0 are the plain least squares of their own
    columns. So the best is the best of all subsets of columns whose plain solution has none below
    0: there are 31. Columns that go together in every step are told apart by nothing, and left to
    one of them, the first.
    """
    weighted, target = work * weight[:, None], took_s * weight
    products, aims = weighted.T @ weighted, weighted.T @ target
    best, least = np.zeros(work.shape[1]), float(target @ target)
    for size in range(1, work.shape[1] + 1):
        for columns in itertools.combinations(range(work.shape[1]), size):
            own = list(columns)
            square = products[np.ix_(own, own)]
            norm = np.sqrt(np.diag(square))
            if not np.all(norm > 0):
                continue
            square = square / np.outer(norm, norm)
            if np.linalg.cond(square) > _CONDITION:
                continue
            rates = np.linalg.solve(square, aims[own] / norm) / norm
            if np.any(rates < 0):
                continue
            error = target - weighted[:, own] @ rates
            loss = float(error @ error)
            if loss < least - _NOTHING * float(target @ target):
                best, least = np.zeros(work.shape[1]), loss
                best[own] = rates
    return best


def _rates_in_words(step_time: StepTime) -> str:
    """
    >>> _rates_in_words(StepTime("", base_s=0.0031, decode_token_s=4.2e-4, pair_s=6e-10))
    '3.10 ms + 420 µs an answer token + 0.600 ns a pair that attends'
    """
    return " + ".join(
        f"{_show_rate(rate)}{what}"
        for what, name in _RATES
        if (rate := getattr(step_time, name)) > 0
    )


def _show_rate(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{show_number(seconds / size, None)} {unit}"
    return f"{show_number(seconds / 1e-9, None)} ns"
