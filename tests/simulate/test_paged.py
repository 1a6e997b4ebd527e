"""The paged scheme's replay: the same run as a slow twin's, and what prefix caching adds to it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.made_trace import Request, made_trace
from models.replay_checks import check_beside
from models.replay_model import MEASURED, STEP_TIMES, PagedModel, replayed
from models.scheduler_model import ModelSequence
from pagedkv.scheduling.limits import SchedulerConfig
from pagedkv.simulate.results import KINDS
from pagedkv.simulate.simulator import SimulationConfig, simulate_scheme

FREE = KINDS.index("free")
CACHED = KINDS.index("cached")
TOKENS = KINDS.index("token_states")


@st.composite
def configs_and_requests(draw: st.DrawFn) -> tuple[SimulationConfig, list[Request]]:
    max_num_seqs = draw(st.integers(1, 5))
    config = SimulationConfig(
        num_blocks=draw(st.integers(2, 14)),
        block_size=draw(st.sampled_from([1, 2, 4])),
        step_time=draw(st.sampled_from(STEP_TIMES)),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 12)),
            chunked_prefill=draw(st.booleans()),
            watermark=draw(st.sampled_from([0.0, 0.2])),
        ),
        num_samples=draw(st.integers(1, min(max_num_seqs, 3))),
        horizon_s=draw(st.sampled_from([math.inf, math.inf, 6.0])),
    )
    gap = st.sampled_from([0.0, 0.25, 1.0, 3.0, 40.0])
    requests, at = [], 0.0
    for _ in range(draw(st.integers(1, 8))):
        requests.append((at, draw(st.integers(1, 14)), draw(st.integers(1, 10))))
        at += draw(gap)
    return config, requests


@given(configs_and_requests())
def test_a_run_is_the_slow_twins_run(case: tuple[SimulationConfig, list[Request]]) -> None:
    config, requests = case
    samples, block_size = config.num_samples, config.block_size
    fits = [-(-(p + o - 1) // block_size) <= config.num_blocks for _, p, o in requests]
    result = simulate_scheme(made_trace(requests), config, "paged")
    assert len(result.refused) == fits.count(False)
    if not any(fits):
        assert result.finished == result.num_steps == 0 and result.share["free"] == 1.0
        return
    scheduler = config.scheduler
    model = PagedModel(
        [
            ModelSequence(0, p, p + o, samples - 1 if j == 0 else 0)
            for _, p, o in requests
            for j in range(samples)
        ],
        config.num_blocks,
        block_size,
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
        scheduler.chunked_prefill,
        int(scheduler.watermark * config.num_blocks),
    )
    for number, sequence in enumerate(model.sequences):
        sequence.number = number
    slow = replayed(
        model,
        {r * samples: requests[r][0] for r in range(len(requests)) if fits[r]},
        step_time=config.step_time,
        horizon_s=config.horizon_s,
    )
    check_beside(result, slow, {s: requests[s // samples] for s in range(len(model.sequences))})
    assert result.recomputed_tokens == slow.recomputed
    assert result.hit_rate_first is None and result.hit_rate_all is None


def small(num_blocks: int, block_size: int = 4, **changes: object) -> SimulationConfig:
    config = SimulationConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        step_time=MEASURED,
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, watermark=0.0),
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def test_a_request_larger_than_the_memory_is_refused_by_name_and_the_others_go_on() -> None:
    trace = made_trace([(0.0, 4, 2), (1.5, 30, 4), (2.0, 4, 2)])
    result = simulate_scheme(trace, small(8), "paged")
    assert result.finished == 2
    assert result.refused == (
        "request 2 (34 tokens, at 1.5 s) needs 9 blocks, the whole memory has 8",
    )
    assert simulate_scheme(trace, small(9), "paged").refused == ()


def test_a_request_longer_than_the_model_serves_is_refused_by_name() -> None:
    trace = made_trace([(0.0, 4, 2), (1.5, 30, 4)])
    result = simulate_scheme(trace, small(100, max_model_len=33), "paged")
    assert result.finished == 1
    assert result.refused == (
        "request 2 (34 tokens, at 1.5 s) is longer than the model's maximum, 33 tokens",
    )
    assert simulate_scheme(trace, small(100, max_model_len=34), "paged").refused == ()


def test_a_memory_too_small_for_two_goes_on_with_one() -> None:
    trace = made_trace([(0.0, 5, 12), (0.0, 5, 12)])
    result = simulate_scheme(trace, small(4), "paged")
    assert result.finished == 2
    assert result.preemptions >= 1
    assert result.running_peak == 2


def test_a_readmitted_request_counts_once_in_the_hit_rate_of_first_admissions() -> None:
    trace = made_trace([(0.0, 7, 8), (0.0, 7, 8)], ids=[[0, 1], [2, 3]], granularity=4)
    result = simulate_scheme(trace, small(5), "paged")
    assert result.preemptions == 1
    assert result.hit_tokens_first == 0
    assert result.hit_rate_first == 0.0
    # It had 9 tokens when it came back, and found its first 4.
    assert result.hit_rate_all == pytest.approx(4 / (7 + 7 + 9))
    assert result.recomputed_tokens == 8 - 4


def test_hits_of_first_admissions_are_counted_in_tokens() -> None:
    trace = made_trace([(0.0, 9, 2), (0.0, 9, 2), (10.0, 9, 2)], ids=[[0, 1, 2]] * 3, granularity=4)
    result = simulate_scheme(trace, small(9), "paged")
    assert result.hit_tokens_first == 8
    assert result.hit_rate_first == result.hit_rate_all == pytest.approx(8 / 27)
    off = simulate_scheme(trace, small(9, prefix_caching=False), "paged")
    assert off.hit_rate_first is None and off.hit_tokens_first == 0
    assert off.share["cached"] == 0.0


def test_freed_blocks_with_a_key_are_cached_and_the_others_free() -> None:
    trace = made_trace([(0.0, 9, 1), (10.0, 1, 1)], ids=[[0, 1, 2], [3]], granularity=4)
    result = simulate_scheme(trace, small(10), "paged")
    # One step of 0.625 + 9/128 s with 3 blocks, one of 0.625 + 1/128 s with 1 and 2 cached.
    first_s, second_s = 0.625 + 9 / 128, 0.625 + 1 / 128
    busy_s = first_s + second_s
    assert result.share["cached"] == pytest.approx(second_s * 2 / 10 / busy_s)
    assert result.share["token_states"] == pytest.approx((first_s * 9 + second_s) / 40 / busy_s)
    assert result.share["never_used"] == pytest.approx((first_s * 3 + second_s * 3) / 40 / busy_s)
    assert result.share["reserved"] == result.share["unusable"] == 0.0
    assert result.memory_map.kind[:, 0].tolist() == [TOKENS] * 3 + [FREE] * 7
    last = result.memory_map.kind[:, -1].tolist()
    assert sorted(last) == [TOKENS] + [CACHED] * 2 + [FREE] * 7


def test_slots_that_the_answer_will_fill_are_reserved_and_the_rest_never_used() -> None:
    trace = made_trace([(0.0, 9, 2)])
    result = simulate_scheme(trace, small(3), "paged")
    first_s, second_s = 0.625 + 9 / 128, 0.625
    busy_s = first_s + second_s
    assert result.share["reserved"] == pytest.approx(first_s / 12 / busy_s)
    assert result.share["never_used"] == pytest.approx(2 / 12)
    assert result.duration_s == pytest.approx(busy_s)


def test_samples_share_the_prompts_blocks() -> None:
    trace = made_trace([(0.0, 32, 9)])
    one = simulate_scheme(trace, small(64), "paged")
    four = simulate_scheme(trace, small(64, num_samples=4), "paged")
    assert one.saved_by_sharing == 0.0
    # While 4 sequences decode, 8 blocks of the prompt count once instead of 4 times.
    prompt_s, decode_s = 0.625 + 32 / 128, 1.0
    entries = prompt_s * 8 + sum(decode_s * 4 * (8 + 1 + i // 4) for i in range(8))
    used = prompt_s * 8 + sum(decode_s * (8 + 4 * (1 + i // 4)) for i in range(8))
    assert four.saved_by_sharing == pytest.approx(1 - used / entries)
    assert four.finished == 4
    assert four.running_peak == 4
    assert four.memory_map.shared[:8, 1].tolist() == [1] * 8
    assert four.memory_map.shared[8:].sum() == 0


def test_a_follower_whose_first_token_is_its_last_never_runs() -> None:
    result = simulate_scheme(made_trace([(0.0, 6, 1)]), small(2, num_samples=3), "paged")
    assert (result.finished, result.num_steps, result.running_peak) == (3, 1, 1)
    assert result.output_tokens_per_s == pytest.approx(3 / result.duration_s)
