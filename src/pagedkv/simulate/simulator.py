"""A trace through one scheme or all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import BrokenLaw, InvalidInput
from pagedkv.memory.allocation import Memory, make_memory
from pagedkv.memory.laws import broken_laws
from pagedkv.scheduling.limits import Limits, SchedulerConfig
from pagedkv.scheduling.queues import Queues, Sequences, make_queues, make_sequences
from pagedkv.scheduling.scheduler import Plan, make_plan
from pagedkv.simulate import contiguous, observation, paged, regions
from pagedkv.simulate.block_keys import sequence_keys
from pagedkv.simulate.hit_rate_curve import hit_rate_curve
from pagedkv.simulate.results import HitRateCurve, Percentiles, SchemeResult
from pagedkv.simulate.run import (
    FINISHED_COUNT,
    HITS_ALL,
    HITS_FIRST,
    NOW_S,
    OUTPUT_TOKENS,
    PEAK_RUNNING,
    PREEMPTIONS,
    QUERIES_ALL,
    QUERIES_FIRST,
    RECOMPUTED,
    STEPS,
    Run,
    make_run,
)
from pagedkv.simulate.step_time import StepTime
from pagedkv.simulate.trace import Trace

SCHEMES = ("paged", "reserve-max", "reserve-pow2", "reserve-exact")
"""All schemes, in the order in which they are shown."""

Progress: TypeAlias = Callable[[str, float], None]
"""Called now and then with the scheme that runs and the share of its requests that are done."""

_STEPS_AT_ONCE = 2_000
"""Few enough that progress moves and an interrupt is felt, enough that calls cost nothing."""


@dataclass(frozen=True)
class SimulationConfig:
    """What to replay a trace on.

    `num_blocks` blocks of `block_size` tokens; the contiguous schemes have the same slots.
    `placement` is how those choose a hole. `max_model_len` is the longest request that the model
    serves, prompt and output; the longest of the trace unless given. `num_samples` answers are
    generated to each prompt. `horizon_s` ends the run early, in simulated time.

    Raises `InvalidInput` for values out of range.
    """

    num_blocks: int
    step_time: StepTime
    block_size: int = 16
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    schemes: tuple[str, ...] = SCHEMES
    placement: str = "first-fit"
    prefix_caching: bool = True
    max_model_len: int | None = None
    num_samples: int = 1
    horizon_s: float = math.inf

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise InvalidInput(
                f"the memory holds {self.num_blocks} blocks of {self.block_size} tokens: give "
                "enough for at least one"
            )
        for scheme in self.schemes:
            if scheme not in SCHEMES:
                raise InvalidInput(f"unknown scheme {scheme!r}: choose from {', '.join(SCHEMES)}")
        if self.placement not in regions.PLACEMENTS:
            raise InvalidInput(
                f"unknown placement {self.placement!r}: choose from {', '.join(regions.PLACEMENTS)}"
            )
        for name in ("block_size", "num_samples", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInput(f"{name.replace('_', '-')} is {value}: give at least 1")
        if self.num_samples > self.scheduler.max_num_seqs:
            raise InvalidInput(
                f"{self.num_samples} samples of a prompt run at once, but max_num_seqs is "
                f"{self.scheduler.max_num_seqs}: raise it or ask for fewer samples"
            )
        if not self.horizon_s > 0:
            raise InvalidInput(f"duration is {self.horizon_s} s: it must be above 0")

    @property
    def num_slots(self) -> int:
        """Tokens that the memory has room for."""
        return self.num_blocks * self.block_size


def simulate_scheme(
    trace: Trace, config: SimulationConfig, scheme: str, progress: Progress | None = None
) -> SchemeResult:
    """Replay `trace` on one scheme.

    Raises `BrokenLaw` if the memory broke one of its laws on the way: a bug in pagedkv.
    """
    if scheme == "paged":
        return _simulate_paged(trace, config, progress)
    return _simulate_contiguous(trace, config, scheme, progress)


def trace_curve(trace: Trace, *, block_size: int) -> HitRateCurve | None:
    """The hit rate of the trace's prompts at every memory size; None without prefix ids.

    Where the ids are a prompt's alone and no finer than `block_size`, an access is an id, a last
    one for fewer tokens included, and a block of the curve is as large as an id: a finer block
    hits with the id that it is a part of. Otherwise an access is a block of `block_size` that the
    prompt fills.
    """
    if not trace.has_prefix_ids:
        return None
    if trace.granularity >= block_size and not trace.covers_output:
        return hit_rate_curve(trace.prefix_ids, block_size=trace.granularity)
    first_key, num_keys, keys = sequence_keys(trace, block_size=block_size, num_samples=1)
    in_prompt = trace.prompt_tokens // block_size
    position = np.arange(len(keys)) - np.repeat(first_key, num_keys)
    prompt_keys = keys[position < np.repeat(in_prompt, num_keys)]
    if len(prompt_keys) == 0:
        return None
    return hit_rate_curve(prompt_keys, block_size=block_size)


@dataclass(frozen=True)
class PagedReplay:
    """A trace on its way through paged memory; `prepare_paged` makes one.

    Sequences are the rows of the trace, each `num_samples` times.
    """

    memory: Memory
    sequences: Sequences
    queues: Queues
    plan: Plan
    limits: Limits
    run: Run
    observation: observation.Observation
    refused: tuple[str, ...]
    """Why, of each request that is not served."""
    _slots: NDArray[np.float64] = field(default_factory=lambda: np.zeros(6), repr=False)

    def advance(self, max_steps: int) -> bool:
        """Replay up to `max_steps` steps; True when there is nothing left to do.

        An idle time until somebody arrives counts as one. Raises nothing; `memory.laws` checks.
        """
        is_over: bool = paged.replay(
            self.memory,
            self.sequences,
            self.queues,
            self.plan,
            self.limits,
            self.run,
            self.observation,
            self._slots,
            max_steps,
        )
        return is_over


def prepare_paged(trace: Trace, config: SimulationConfig) -> PagedReplay:
    """The replay of `trace` on paged memory, before its first step.

    Raises `InvalidInput` where both the trace and `config` ask for several samples.
    """
    samples, block_size = config.num_samples, config.block_size
    if samples > 1 and (trace.has_samples or trace.interruptions is not None):
        raise InvalidInput(
            f"{trace.name} is a recorded run, with the answers that it has: leave num-samples at 1"
        )
    sample = trace.sample
    if sample is None or samples > 1:
        sample = np.tile(np.arange(samples), len(trace))
    leads = sample == 0
    lead = np.flatnonzero(leads)
    num_answers = np.diff(lead, append=len(sample))
    total_tokens = _total_tokens(trace, samples)
    computed = total_tokens - 1  # the last token's K and V are never needed
    needed = -(-computed // block_size)
    longest = _longest(trace, config)
    most_seats = config.scheduler.max_num_seqs
    does_not_fit = (needed > config.num_blocks) | (total_tokens > longest)
    does_not_fit |= np.repeat(num_answers > most_seats, num_answers)
    refused = np.repeat(np.logical_or.reduceat(does_not_fit, lead), num_answers)
    reasons = [
        _why_refused(trace, config, total_tokens, needed, first, int(count))
        for first, count in zip(lead.tolist(), num_answers)
        if refused[first]
    ]
    first_key = num_keys = keys = None
    if config.prefix_caching:
        first_key, num_keys, keys = sequence_keys(trace, block_size=block_size, num_samples=samples)
    num_followers = np.zeros(len(sample), dtype=np.int64)
    num_followers[lead] = num_answers - 1
    sequences = make_sequences(
        np.repeat(trace.prompt_tokens, samples),
        total_tokens,
        num_followers=num_followers,
        first_key=first_key,
        num_keys=num_keys,
        keys=keys,
    )
    width = int(needed[~refused].max(initial=1))
    seats = min(most_seats, len(total_tokens))
    limits = config.scheduler.limits(num_blocks=config.num_blocks, block_size=block_size)
    return PagedReplay(
        memory=make_memory(config.num_blocks, seats, width),
        sequences=sequences,
        queues=make_queues(len(total_tokens), seats),
        plan=make_plan(seats, width),
        limits=limits._replace(max_num_seqs=seats),
        run=_make_run(trace, config, refused, ~leads),
        observation=_make_observation(trace, config),
        refused=tuple(reasons),
    )


def _simulate_paged(
    trace: Trace, config: SimulationConfig, progress: Progress | None
) -> SchemeResult:
    replay = prepare_paged(trace, config)
    while not replay.advance(_STEPS_AT_ONCE):
        _report(progress, "paged", replay.run, config)
    broken = broken_laws(replay.memory, config.block_size)
    if broken:
        raise BrokenLaw(broken)
    caching = config.prefix_caching and trace.has_prefix_ids
    return _result(
        "paged",
        None,
        trace,
        config,
        replay.run,
        replay.observation,
        list(replay.refused),
        caching=caching,
    )


def _simulate_contiguous(
    trace: Trace, config: SimulationConfig, scheme: str, progress: Progress | None
) -> SchemeResult:
    if trace.interruptions is not None:
        raise InvalidInput(
            f"{trace.name} is to be repeated step by step, which is only the same run on paged "
            f"memory: leave out scheme {scheme}"
        )
    samples = config.num_samples
    policy = regions.PLACEMENTS[config.placement]
    total_tokens = _total_tokens(trace, samples)
    longest = _longest(trace, config)
    prompt_tokens = np.repeat(trace.prompt_tokens, samples)
    region_tokens = _region_tokens(scheme, prompt_tokens, total_tokens, longest)
    granted = region_tokens
    largest = config.num_slots
    if policy == regions.BUDDY:
        granted = _next_power_of_two(region_tokens)
        largest = 2 ** (config.num_slots.bit_length() - 1)
    refused = (granted > largest) | (total_tokens > longest)
    reasons = [
        _too_long(trace, s // samples, longest)
        if total_tokens[s] > longest
        else f"{_name(trace, s // samples)} reserves a region of {granted[s]} slots, the largest "
        f"that the memory can give is {largest}"
        for s in np.flatnonzero(refused)[::samples]
    ]
    sequences = make_sequences(prompt_tokens, total_tokens)
    seats = min(config.scheduler.max_num_seqs, len(total_tokens))
    limits = config.scheduler.limits(num_blocks=config.num_blocks, block_size=config.block_size)
    limits = limits._replace(max_num_seqs=seats)
    state = regions.make_regions(config.num_slots, max_regions=seats)
    queues = make_queues(len(total_tokens), seats)
    plan = make_plan(seats, 1)
    run = _make_run(trace, config, refused, np.zeros(len(total_tokens), dtype=np.bool_))
    seen = _make_observation(trace, config)
    num_computed = np.zeros(len(total_tokens), dtype=np.int64)
    slots = np.zeros(6)
    while not contiguous.replay(
        state,
        policy,
        region_tokens,
        num_computed,
        sequences,
        queues,
        plan,
        limits,
        run,
        seen,
        slots,
        _STEPS_AT_ONCE,
    ):
        _report(progress, scheme, run, config)
    return _result(scheme, config.placement, trace, config, run, seen, reasons, caching=False)


def _region_tokens(
    scheme: str,
    prompt_tokens: NDArray[np.int64],
    total_tokens: NDArray[np.int64],
    longest: int,
) -> NDArray[np.int64]:
    """What each request reserves, in tokens whose K and V have to be kept.

    The last token of an answer is not among them: nothing is computed after it.
    """
    if scheme == "reserve-exact":
        return total_tokens - 1
    if scheme == "reserve-pow2":
        output = _next_power_of_two(total_tokens - prompt_tokens)
        reserved: NDArray[np.int64] = np.minimum(prompt_tokens + output, longest)
        return reserved
    return np.full(len(total_tokens), longest, dtype=np.int64)


def _next_power_of_two(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The least power of two that is not below each value; exact up to 2**53."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    powers: NDArray[np.int64] = np.left_shift(np.int64(1), exponent.astype(np.int64))
    return powers


def _total_tokens(trace: Trace, samples: int) -> NDArray[np.int64]:
    total: NDArray[np.int64] = trace.prompt_tokens + trace.output_tokens
    if trace.interruptions is not None:  # these wanted more: what ends them is no last token
        total[trace.interruptions.cancelled] += 1
        total[trace.interruptions.failed] += 1
    return np.repeat(total, samples)


def _longest(trace: Trace, config: SimulationConfig) -> int:
    if config.max_model_len is not None:
        return config.max_model_len
    return int(_total_tokens(trace, 1).max())


def _why_refused(
    trace: Trace,
    config: SimulationConfig,
    total_tokens: NDArray[np.int64],
    needed: NDArray[np.int64],
    first: int,
    num_answers: int,
) -> str:
    """Why the request whose sequences are `first` to `first + num_answers` is not served."""
    rows = slice(first, first + num_answers)
    longest = first + int(total_tokens[rows].argmax())
    row = longest // config.num_samples
    if needed[rows].max() > config.num_blocks:
        return (
            f"{_name(trace, row)} needs {needed[longest]} blocks, the whole memory has "
            f"{config.num_blocks}"
        )
    if num_answers > config.scheduler.max_num_seqs:
        return (
            f"{_name(trace, row)} has {num_answers} answers, which run at once, and max_num_seqs "
            f"is {config.scheduler.max_num_seqs}"
        )
    return _too_long(trace, row, _longest(trace, config))


def _name(trace: Trace, request: int) -> str:
    tokens = int(trace.prompt_tokens[request] + trace.output_tokens[request])
    number = request + 1 if trace.sample is None else int((trace.sample[: request + 1] == 0).sum())
    return f"request {number} ({tokens:,} tokens, at {trace.arrival_s[request]:.1f} s)"


def _too_long(trace: Trace, request: int, longest: int) -> str:
    return f"{_name(trace, request)} is longer than the model's maximum, {longest:,} tokens"


def _make_run(
    trace: Trace,
    config: SimulationConfig,
    refused: NDArray[np.bool_],
    follows: NDArray[np.bool_],
) -> Run:
    return make_run(
        np.repeat(trace.arrival_s, config.num_samples),
        refused,
        follows,
        config.step_time.params(),
        horizon_s=config.horizon_s,
        interruptions=trace.interruptions,
    )


def _make_observation(trace: Trace, config: SimulationConfig) -> observation.Observation:
    expected_s = min(float(trace.arrival_s[-1]) + 1.0, config.horizon_s)
    return observation.make_observation(expected_s=expected_s, num_blocks=config.num_blocks)


def _report(progress: Progress | None, scheme: str, run: Run, config: SimulationConfig) -> None:
    if progress is not None:
        done = int(run.totals[FINISHED_COUNT]) / max(int((~run.refused).sum()), 1)
        progress(scheme, min(max(done, float(run.clock[NOW_S]) / config.horizon_s), 1.0))


def _result(
    scheme: str,
    placement: str | None,
    trace: Trace,
    config: SimulationConfig,
    run: Run,
    seen: observation.Observation,
    refused: list[str],
    *,
    caching: bool,
) -> SchemeResult:
    totals = run.totals
    any_queries = caching and totals[QUERIES_FIRST] > 0
    duration_s = float(run.clock[NOW_S])
    busy_s = float(seen.times[observation.BUSY_S])
    done = ~np.isnan(run.finish_s)
    ttft_s = (run.first_token_s - run.arrival_s)[~np.isnan(run.first_token_s)]
    output = np.repeat(trace.output_tokens, config.num_samples)
    several = done & (output > 1)
    tpot_s = (run.finish_s - run.first_token_s)[several] / (output[several] - 1)
    entries, used = seen.entries
    return SchemeResult(
        scheme=scheme,
        placement=placement,
        share=observation.busy_share(seen),
        running_mean=float(seen.busy[observation.RUNNING_COLUMN]) / busy_s if busy_s else 0.0,
        running_peak=int(totals[PEAK_RUNNING]),
        preemptions=int(totals[PREEMPTIONS]),
        recomputed_tokens=int(totals[RECOMPUTED]),
        hit_rate_first=_rate(totals[HITS_FIRST], totals[QUERIES_FIRST]) if any_queries else None,
        hit_rate_all=_rate(totals[HITS_ALL], totals[QUERIES_ALL]) if any_queries else None,
        hit_tokens_first=int(totals[HITS_FIRST]),
        saved_by_sharing=float(1.0 - used / entries) if entries > 0 else 0.0,
        requests_per_s=_rate(totals[FINISHED_COUNT], duration_s),
        output_tokens_per_s=_rate(totals[OUTPUT_TOKENS], duration_s),
        ttft_s=_percentiles(ttft_s),
        tpot_s=_percentiles(tpot_s),
        duration_s=duration_s,
        num_steps=int(totals[STEPS]),
        began=len(ttft_s),
        finished=int(totals[FINISHED_COUNT]),
        refused=tuple(refused),
        timeline=observation.timeline(seen),
        memory_map=observation.memory_map(seen, num_slots=config.num_slots),
    )


def _rate(part: float, whole: float) -> float:
    return float(part / whole) if whole > 0 else 0.0


def _percentiles(values: NDArray[np.float64]) -> Percentiles:
    if len(values) == 0:
        return Percentiles(math.nan, math.nan, math.nan)
    return Percentiles(*(float(p) for p in np.percentile(values, (50, 90, 99))))
