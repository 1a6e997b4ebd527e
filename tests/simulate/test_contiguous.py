"""The contiguous schemes' replay: the same run as a slow twin's, and what each scheme wastes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.made_trace import Request, made_trace
from models.replay_checks import check_beside
from models.replay_model import MEASURED, STEP_TIMES, ContiguousModel, replayed
from models.scheduler_model import ModelSequence
from pagedkv.scheduling.limits import SchedulerConfig
from pagedkv.simulate.regions import PLACEMENTS
from pagedkv.simulate.results import KINDS
from pagedkv.simulate.simulator import SimulationConfig, simulate_scheme

SCHEMES = ("reserve-max", "reserve-pow2", "reserve-exact")
LONGEST = 24


def region(scheme: str, prompt: int, output: int) -> int:
    """Slots that the scheme asks for."""
    if scheme == "reserve-max":
        return LONGEST
    if scheme == "reserve-exact":
        return prompt + output - 1
    power = 1
    while power < output:
        power *= 2
    return min(prompt + power, LONGEST)


@st.composite
def configs_and_requests(draw: st.DrawFn) -> tuple[SimulationConfig, list[Request]]:
    max_num_seqs = draw(st.integers(1, 5))
    config = SimulationConfig(
        num_blocks=draw(st.integers(5, 25)),
        block_size=4,
        step_time=draw(st.sampled_from(STEP_TIMES)),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 20)),
            chunked_prefill=draw(st.booleans()),
        ),
        placement=draw(st.sampled_from(sorted(PLACEMENTS))),
        max_model_len=LONGEST,
        num_samples=draw(st.sampled_from([1, 1, min(max_num_seqs, 2)])),
        horizon_s=draw(st.sampled_from([math.inf, math.inf, 6.0])),
    )
    requests, at = [], 0.0
    for _ in range(draw(st.integers(1, 9))):
        requests.append((at, draw(st.integers(1, 14)), draw(st.integers(1, 12))))
        at += draw(st.sampled_from([0.0, 0.25, 1.0, 3.0, 40.0]))
    return config, requests


@given(configs_and_requests(), st.sampled_from(SCHEMES))
def test_a_run_is_the_slow_twins_run(
    case: tuple[SimulationConfig, list[Request]], scheme: str
) -> None:
    config, requests = case
    samples = config.num_samples
    largest = config.num_slots
    asked = [region(scheme, p, o) for _, p, o in requests]
    granted = asked
    if config.placement == "buddy":
        granted = [1 << (size - 1).bit_length() for size in asked]
        largest = 1 << (largest.bit_length() - 1)
    fits = [size <= largest and p + o <= LONGEST for size, (_, p, o) in zip(granted, requests)]
    result = simulate_scheme(made_trace(requests), config, scheme)
    assert len(result.refused) == fits.count(False)
    assert (result.scheme, result.placement) == (scheme, config.placement)
    if not any(fits):
        assert result.finished == result.num_steps == 0 and result.share["free"] == 1.0
        return
    sequences = [
        ModelSequence(r * samples + j, p, p + o)
        for r, (_, p, o) in enumerate(requests)
        for j in range(samples)
    ]
    model = ContiguousModel(
        sequences,
        [asked[s // samples] for s in range(len(sequences))],
        config.num_slots,
        config.placement,
        config.scheduler.max_num_seqs,
        config.scheduler.max_num_batched_tokens,
        config.scheduler.chunked_prefill,
    )
    slow = replayed(
        model,
        {s: requests[s // samples][0] for s in range(len(sequences)) if fits[s // samples]},
        step_time=config.step_time,
        horizon_s=config.horizon_s,
    )
    check_beside(result, slow, {s: requests[s // samples] for s in range(len(sequences))})
    assert result.hit_rate_first is None and result.hit_rate_all is None
    assert result.preemptions == result.recomputed_tokens == 0
    assert result.saved_by_sharing == 0.0
    if scheme == "reserve-exact":
        assert result.share["never_used"] == 0.0
    assert result.share["cached"] == 0.0


def small(num_slots: int, **changes: object) -> SimulationConfig:
    config = SimulationConfig(
        num_blocks=num_slots,
        block_size=1,
        step_time=MEASURED,
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        max_model_len=LONGEST,
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def test_what_each_scheme_reserves_for_the_same_request() -> None:
    trace = made_trace([(0.0, 6, 5)])  # 10 tokens to keep
    share = {s: simulate_scheme(trace, small(100), s).share for s in SCHEMES}
    assert share["reserve-exact"]["never_used"] == 0.0
    assert share["reserve-pow2"]["never_used"] == pytest.approx((6 + 8 - 10) / 100)
    assert share["reserve-max"]["never_used"] == pytest.approx((LONGEST - 10) / 100)
    for kinds in share.values():
        assert kinds["token_states"] + kinds["reserved"] == pytest.approx(10 / 100)
        assert kinds["unusable"] == 0.0
        assert sum(kinds.values()) == pytest.approx(1.0)


def test_a_power_of_two_is_not_doubled_and_never_passes_the_models_maximum() -> None:
    exact = simulate_scheme(made_trace([(0.0, 6, 8)]), small(100), "reserve-pow2")
    assert exact.share["never_used"] == pytest.approx((14 - 13) / 100)
    capped = simulate_scheme(made_trace([(0.0, 14, 9)]), small(100), "reserve-pow2")
    assert capped.share["never_used"] == pytest.approx((LONGEST - 22) / 100)


def test_what_a_buddy_rounds_up_is_unusable() -> None:
    trace = made_trace([(0.0, 6, 5)])
    result = simulate_scheme(trace, small(100, placement="buddy"), "reserve-exact")
    assert result.share["unusable"] == pytest.approx((16 - 10) / 100)
    assert result.share["free"] == pytest.approx(84 / 100)


def test_free_memory_is_unusable_only_while_the_first_that_waits_fits_nowhere() -> None:
    blocked = simulate_scheme(made_trace([(0.0, 6, 5), (0.0, 6, 1)]), small(29), "reserve-max")
    assert blocked.finished == 2
    # 5 slots beside the first region while the second waits; free while it runs alone.
    first_s, second_s = 0.625 + 6 / 128 + 4 * 0.625, 0.625 + 6 / 128
    assert blocked.share["unusable"] == pytest.approx(5 / 29 * first_s / (first_s + second_s))
    assert blocked.share["free"] == pytest.approx(5 / 29 * second_s / (first_s + second_s))

    no_seat = small(100, scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64))
    assert simulate_scheme(made_trace([(0.0, 6, 5)] * 2), no_seat, "reserve-max").share[
        "unusable"
    ] == pytest.approx(0.0)


def test_free_memory_is_unusable_also_where_a_step_has_no_tokens_left_to_try() -> None:
    config = small(40, scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=4))
    result = simulate_scheme(made_trace([(0.0, 14, 1), (0.0, 14, 1)]), config, "reserve-max")
    assert result.share["unusable"] == pytest.approx(16 / 40 * 1 / 2)


def test_regions_are_refused_by_name_where_they_can_never_be_placed() -> None:
    trace = made_trace([(0.0, 6, 5), (2.0, 20, 9), (3.0, 2, 2)])
    result = simulate_scheme(trace, small(23, max_model_len=40), "reserve-exact")
    assert result.finished == 2
    assert result.refused == (
        "request 2 (29 tokens, at 2.0 s) reserves a region of 28 slots, the largest that the "
        "memory can give is 23",
    )
    buddy = simulate_scheme(trace, small(31, max_model_len=40, placement="buddy"), "reserve-exact")
    assert buddy.finished == 2
    assert buddy.refused == (
        "request 2 (29 tokens, at 2.0 s) reserves a region of 32 slots, the largest that the "
        "memory can give is 16",
    )
    longer = simulate_scheme(trace, small(100), "reserve-exact")
    assert longer.refused == (
        f"request 2 (29 tokens, at 2.0 s) is longer than the model's maximum, {LONGEST} tokens",
    )
    nobody = simulate_scheme(trace, small(23), "reserve-max")
    assert (len(nobody.refused), nobody.finished) == (3, 0)


def test_the_map_shows_a_region_token_by_token() -> None:
    trace = made_trace([(0.0, 6, 5)])
    result = simulate_scheme(trace, small(40), "reserve-max")
    tokens, reserved, never, unusable, _, free = range(6)
    first = result.memory_map.kind[:, 0].tolist()
    assert first == [tokens] * 6 + [reserved] * 4 + [never] * 14 + [free] * 16
    buddy = simulate_scheme(trace, small(40, placement="buddy"), "reserve-max")
    first = buddy.memory_map.kind[:, 0].tolist()
    assert first == [tokens] * 6 + [reserved] * 4 + [never] * 14 + [unusable] * 8 + [free] * 8
    assert KINDS == ("token_states", "reserved", "never_used", "unusable", "cached", "free")
