"""Rates fitted to measured steps: known ones are found again, whatever else the machine did."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagedkv.errors import InvalidInput
from pagedkv.simulate.measured_steps import MeasuredSteps
from pagedkv.simulate.step_time import LEAST_STEP_S, StepTime, step_time_s
from pagedkv.simulate.step_time_fit import (
    LEAST_STEPS,
    MOST_STEPS,
    _nonnegative_rates,
    fitted_step_time,
)

NAMES = ("base_s", "prefill_token_s", "decode_token_s", "read_token_s", "pair_s")


def work_of(rng: np.random.Generator, num_steps: int) -> list[NDArray[np.int64]]:
    """Prompt tokens, answer tokens, context tokens and pairs of steps as a server has them."""
    decode = rng.integers(0, 33, num_steps)
    decode_context = decode * rng.integers(20, 2_000, num_steps)
    prefill = np.where(rng.random(num_steps) < 0.3, rng.integers(1, 1_000, num_steps), 0)
    prefill[decode + prefill == 0] = 7
    before = rng.integers(0, 4_000, num_steps) * (prefill > 0)
    pairs = prefill * before + prefill * (prefill + 1) // 2 + decode_context
    return [prefill, decode, decode_context + before + prefill, pairs]


def told_s(step_time: StepTime, work: list[NDArray[np.int64]]) -> NDArray[np.float64]:
    rates = np.array([getattr(step_time, name) for name in NAMES])
    told: NDArray[np.float64] = rates[0] + rates[1:] @ np.stack(work).astype(np.float64)
    return told


def test_the_simulator_times_a_step_by_the_rates() -> None:
    step_time = StepTime("true", **{name: 2.0**-i for i, name in enumerate(NAMES)})
    work = work_of(np.random.default_rng(0), 9)
    told = [step_time_s(step_time.params(), *(int(w[i]) for w in work), 3) for i in range(9)]
    assert told == told_s(step_time, work).tolist()


rates = st.builds(
    StepTime,
    st.just("true"),
    base_s=st.floats(1e-4, 0.2),
    prefill_token_s=st.just(0.0) | st.floats(1e-6, 5e-3),
    decode_token_s=st.just(0.0) | st.floats(1e-6, 5e-3),
    read_token_s=st.just(0.0) | st.floats(1e-9, 1e-5),
    pair_s=st.just(0.0) | st.floats(1e-12, 1e-6),
)


@settings(max_examples=30)
@given(true=rates, seed=st.integers(0, 999), num_steps=st.integers(80, 400))
def test_rates_are_found_again_in_the_steps_that_they_make(
    true: StepTime, seed: int, num_steps: int
) -> None:
    work = work_of(np.random.default_rng(seed), num_steps)
    fit = fitted_step_time(MeasuredSteps(told_s(true, work), *work))
    for name in NAMES:
        part = getattr(fit.step_time, name) - getattr(true, name)
        # What a rate is off by is nothing beside the steps that it has a part in.
        largest = max(1, *(int(w.max()) for w in work)) if name == "pair_s" else 1_000
        assert abs(part) * largest < 1e-4 * told_s(true, work).max(), name
    assert told_s(fit.step_time, work) == pytest.approx(told_s(true, work), rel=1e-4)
    assert fit.half_within < 1e-4 and fit.total == pytest.approx(1.0, abs=1e-4)
    assert fit.num_steps == num_steps


@settings(max_examples=30)
@given(true=rates, seed=st.integers(0, 999))
def test_noise_and_steps_that_took_a_hundred_times_as_long_leave_the_rates_near(
    true: StepTime, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    work = work_of(rng, 1_000)
    exact = told_s(true, work)
    took_s = exact * rng.lognormal(0.0, 0.05, len(exact))
    odd = rng.random(len(exact)) < 0.05
    took_s[odd] *= rng.uniform(2, 100, int(odd.sum()))
    fit = fitted_step_time(MeasuredSteps(took_s, *work))
    off = np.abs(told_s(fit.step_time, work) / exact - 1)
    assert np.median(off) < 0.03 and off.max() < 0.25
    assert 0.02 < fit.half_within < 0.06
    assert fit.total < 1  # of what was taken, the odd steps too


@settings(max_examples=30)
@given(
    seed=st.integers(0, 999),
    took_s=st.lists(st.floats(1e-6, 1e6), min_size=LEAST_STEPS, max_size=LEAST_STEPS + 20),
    zeros=st.sets(st.integers(0, 3)),
)
def test_no_rate_is_negative_or_endless_whatever_was_measured(
    seed: int, took_s: list[float], zeros: set[int]
) -> None:
    work = work_of(np.random.default_rng(seed), len(took_s))
    for column in zeros - {0, 1}:
        work[column][:] = 0
    fit = fitted_step_time(MeasuredSteps(np.array(took_s), *work))
    for name in NAMES:
        assert 0 <= getattr(fit.step_time, name) < 1e10, name
    assert fit.step_time.base_s >= LEAST_STEP_S
    assert np.isfinite(fit.half_within) and np.isfinite(fit.total)
    assert "\n" not in fit.in_words and "nan" not in fit.in_words


@given(seed=st.integers(0, 9_999))
def test_rates_are_the_best_that_are_not_negative(seed: int) -> None:
    """Beside a slow twin: no small change of them that keeps them above 0 is better."""
    rng = np.random.default_rng(seed)
    work = np.abs(rng.normal(size=(40, 4)))
    took_s, weight = rng.normal(size=40) + 0.5, rng.uniform(0.1, 2.0, 40)
    found = _nonnegative_rates(work, took_s, weight)
    assert np.all(found >= 0)
    slope = work.T @ (weight**2 * (work @ found - took_s))
    # Where a rate is above 0 nothing is won either way; at 0, only more would cost.
    assert np.all(np.abs(slope[found > 0]) < 1e-7)
    assert np.all(slope[found == 0] > -1e-7)


def test_errors_count_as_squares_up_to_what_is_usual_and_then_as_they_are() -> None:
    """At the best rates nothing is won by a little more or less of any: Huber's own condition."""
    rng = np.random.default_rng(3)
    work = work_of(rng, 500)
    true = StepTime("true", base_s=0.01, prefill_token_s=1e-4, decode_token_s=1e-3)
    took_s = told_s(true, work) * rng.lognormal(0.0, 0.2, 500) * rng.choice([1, 1, 1, 2], 500)
    fit = fitted_step_time(MeasuredSteps(took_s, *work)).step_time
    told = told_s(fit, work)
    error = took_s / told - 1
    usual = 1.345 * 1.4826 * np.median(np.abs(error))
    columns = np.stack([np.ones(500), *work])
    pull = columns @ (np.clip(error, -usual, usual) / told)
    most = columns @ (usual / told)
    for name, share in zip(NAMES, pull / most):
        if getattr(fit, name) > 0:
            assert abs(share) < 1e-3, name
        else:
            assert share < 1e-3, name  # only a rate below 0 would be better


def test_a_machine_that_slept_through_a_step_leaves_the_rates_as_they_were() -> None:
    work = work_of(np.random.default_rng(0), 60)
    true = StepTime("true", base_s=0.01, prefill_token_s=1e-4, decode_token_s=1e-3)
    took_s = told_s(true, work)
    for odd in range(0, 60, 5):
        took_s[odd] = 86_400.0
    fit = fitted_step_time(MeasuredSteps(took_s, *work))
    assert told_s(fit.step_time, work) == pytest.approx(told_s(true, work), rel=1e-3)


def test_time_passes_in_every_step_whatever_its_rates_are() -> None:
    prefill = np.tile([1, 2, 3, 4], 25)
    nothing = np.zeros_like(prefill)
    fit = fitted_step_time(
        MeasuredSteps(0.125 * prefill, prefill, nothing, nothing, nothing)
    ).step_time
    assert fit.prefill_token_s == pytest.approx(0.125) and fit.base_s == LEAST_STEP_S


def test_too_few_steps_and_steps_all_alike_are_refused_in_a_line() -> None:
    work = work_of(np.random.default_rng(0), LEAST_STEPS - 1)
    with pytest.raises(InvalidInput, match=r"^49 steps were recorded, and it takes 50 to tell"):
        fitted_step_time(MeasuredSteps(np.ones(LEAST_STEPS - 1), *work))
    one = [column[:1] for column in work]
    with pytest.raises(InvalidInput, match=r"^1 step was recorded"):
        fitted_step_time(MeasuredSteps(np.ones(1), *one))
    alike = [np.full(1_200, n) for n in (0, 4, 90, 90)]
    with pytest.raises(InvalidInput, match=r"^all 1,200 recorded steps computed and read just as"):
        fitted_step_time(MeasuredSteps(np.ones(1_200), *alike))


def test_what_went_together_in_every_step_is_told_by_one_rate() -> None:
    decode = np.tile([1, 2, 3, 4], 25)
    took_s = 0.01 + 0.001 * decode
    fit = fitted_step_time(
        MeasuredSteps(took_s, np.zeros_like(decode), decode, 10 * decode, 10 * decode)
    ).step_time
    assert fit.base_s == pytest.approx(0.01) and fit.decode_token_s == pytest.approx(0.001)
    assert fit.read_token_s == fit.pair_s == 0


def test_of_very_many_steps_some_from_all_of_the_run_are_looked_at() -> None:
    work = work_of(np.random.default_rng(0), 3 * MOST_STEPS)
    true = StepTime("true", base_s=0.01, decode_token_s=0.001)
    took_s = 0.01 + 0.001 * work[1]
    took_s[len(took_s) // 2 :] *= 3
    fit = fitted_step_time(MeasuredSteps(took_s, *work))
    assert fit.num_steps == 3 * MOST_STEPS
    assert 1.5 * true.base_s < fit.step_time.base_s < 3 * true.base_s


def line_of(**changes: Any) -> str:
    work = work_of(np.random.default_rng(0), 1_204)
    true = StepTime("true", base_s=0.0031, prefill_token_s=4.2e-4, pair_s=2.5e-9)
    steps = MeasuredSteps(told_s(true, work), *work)
    return replace(fitted_step_time(steps), **changes).in_words


def test_a_line_says_the_rates_and_how_well_they_fit() -> None:
    assert line_of(half_within=0.0612, total=0.934) == (
        "steps timed by this recording: 3.10 ms + 420 µs a prompt token + 2.50 ns a pair that "
        "attends; half of the 1,204 steps within 6.1 %, all together 7 % less than measured; seen "
        "with up to 996 prompt and 32 answer tokens a step"
    )
    assert "all together as measured;" in line_of(total=1.004)
    assert "all together 12 % more than measured;" in line_of(total=1.12)
