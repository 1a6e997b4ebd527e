"""Whole simulations: determinism, conservation, Little's law, and settings that are refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from models.made_trace import Request, made_trace
from pagedkv.errors import BrokenLaw, InvalidInput
from pagedkv.scheduling.limits import SchedulerConfig
from pagedkv.simulate.run import Run, make_run
from pagedkv.simulate.simulator import SCHEMES, SimulationConfig, simulate_scheme, trace_curve
from pagedkv.simulate.step_time import measured_step_time
from pagedkv.simulate.trace import Trace

BASE_S, SEQUENCE_S, RATE = 0.02, 0.0005, 20_000.0
STEP_TIME = measured_step_time(prefill_rate_tokens_per_s=RATE, base_s=BASE_S, sequence_s=SEQUENCE_S)


def busy_requests(count: int, *, rate_per_s: float, seed: int = 7) -> list[Request]:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate_per_s, count))
    return [
        (float(at), int(prompt), int(output))
        for at, prompt, output in zip(
            arrivals, rng.integers(1, 300, count), rng.integers(1, 200, count)
        )
    ]


def busy_trace(count: int = 200, *, rate_per_s: float = 3.0) -> Trace:
    requests = busy_requests(count, rate_per_s=rate_per_s)
    rng = np.random.default_rng(8)
    ids = [
        [1000 * int(rng.integers(0, 4)) + i for i in range(-(-prompt // 32))]
        for _, prompt, _ in requests
    ]
    return made_trace(requests, ids=ids, granularity=32)


def config(**changes: object) -> SimulationConfig:
    base = SimulationConfig(
        num_blocks=150,
        step_time=STEP_TIME,
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_same_trace_and_settings_give_the_same_bytes(scheme: str) -> None:
    one, two = (simulate_scheme(busy_trace(), config(), scheme) for _ in range(2))
    assert one.timeline.share.tobytes() == two.timeline.share.tobytes()
    assert one.memory_map.kind.tobytes() == two.memory_map.kind.tobytes()
    assert repr(one) == repr(two)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("num_samples", [1, 3])
def test_every_output_token_of_every_request_comes_out_once(scheme: str, num_samples: int) -> None:
    trace = busy_trace()
    result = simulate_scheme(trace, config(num_samples=num_samples), scheme)
    assert result.finished == len(trace) * num_samples and result.refused == ()
    made = result.output_tokens_per_s * result.duration_s
    assert made == pytest.approx(int(trace.output_tokens.sum()) * num_samples)
    assert result.requests_per_s * result.duration_s == pytest.approx(result.finished)
    assert sum(result.share.values()) == pytest.approx(1.0)
    if scheme == "paged":
        assert result.preemptions > 0, "a run without pressure says little"
        assert result.hit_rate_first is not None and 0 < result.hit_rate_first < 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_requests_in_the_system_are_throughput_times_time_in_it(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Little's law, exact over a run that begins and ends empty, but that an arrival counts only
    from the next step on."""
    runs: list[Run] = []

    def kept(*arrays: Any, **settings: Any) -> Run:
        runs.append(make_run(*arrays, **settings))
        return runs[-1]

    monkeypatch.setattr("pagedkv.simulate.simulator.make_run", kept)
    result = simulate_scheme(made_trace(busy_requests(300, rate_per_s=2.0)), config(), scheme)
    (run,) = runs
    line = result.timeline
    in_system = ((line.running + line.waiting) * (line.end_s - line.start_s)).sum()
    time_in_it = (run.finish_s - run.arrival_s).sum()
    longest_step_s = BASE_S + 64 * SEQUENCE_S + 512 / RATE
    assert time_in_it - 300 * longest_step_s < in_system < time_in_it
    served = (run.finish_s - run.first_token_s).sum()
    holding = (line.running * (line.end_s - line.start_s)).sum()
    assert holding > served
    ttft_s = run.first_token_s - run.arrival_s
    assert result.ttft_s.p90 == pytest.approx(float(np.percentile(ttft_s, 90)))
    assert (run.finish_s >= run.first_token_s).all() and (ttft_s > 0).all()


def test_a_lone_request_waits_for_nobody() -> None:
    trace = made_trace([(0.0, 100, 11), (100.0, 100, 11), (200.0, 100, 11)])
    for scheme in SCHEMES:
        result = simulate_scheme(trace, config(), scheme)
        ttft_s = BASE_S + SEQUENCE_S + 100 / RATE
        assert [result.ttft_s.p50, result.ttft_s.p99] == pytest.approx([ttft_s] * 2)
        assert [result.tpot_s.p50, result.tpot_s.p99] == pytest.approx([BASE_S + SEQUENCE_S] * 2)
        assert result.running_mean == pytest.approx(1.0)
        assert result.duration_s == pytest.approx(200 + ttft_s + 10 * (BASE_S + SEQUENCE_S))


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    trace = made_trace([(0.0, 1200, 1)])
    chunked = simulate_scheme(trace, config(), "paged")
    assert chunked.num_steps == 3
    whole = config(
        scheduler=SchedulerConfig(
            max_num_seqs=64, max_num_batched_tokens=512, chunked_prefill=False
        )
    )
    assert simulate_scheme(trace, whole, "paged").num_steps == 1


def test_under_overload_requests_leave_as_fast_as_the_server_can_and_wait_ever_longer() -> None:
    requests = [(0.001 * i, 100, 20) for i in range(400)]
    result = simulate_scheme(made_trace(requests), config(num_blocks=64), "paged")
    assert result.finished == 400
    # 8 blocks a request at its end: never more than 9 of 7 blocks at once.
    assert 7 <= result.running_mean <= 9.2
    assert result.ttft_s.p90 > 5 * result.ttft_s.p50 / 4
    assert result.ttft_s.p50 == pytest.approx(result.duration_s / 2, rel=0.1)


def test_paged_memory_serves_more_at_once_than_any_region_that_cannot_see_the_future() -> None:
    requests = [(0.0, prompt, output) for _, prompt, output in busy_requests(200, rate_per_s=1)]
    running = {
        scheme: simulate_scheme(made_trace(requests), config(), scheme).running_mean
        for scheme in SCHEMES
    }
    assert running["paged"] > running["reserve-exact"] > running["reserve-pow2"]
    assert running["reserve-pow2"] > running["reserve-max"]


def test_a_run_ends_at_its_horizon_with_the_step_that_crosses_it() -> None:
    requests = busy_requests(200, rate_per_s=3.0)
    for scheme in SCHEMES:
        result = simulate_scheme(made_trace(requests), config(horizon_s=20.0), scheme)
        assert 20.0 <= result.duration_s < 20.0 + 0.1
        assert 0 < result.finished < 200
        assert result.timeline.end_s[-1] == pytest.approx(result.duration_s)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_run_cut_short_counts_what_came_out_by_then(scheme: str) -> None:
    # Each request takes 11 steps of 20.5 ms and 5 ms for its prompt, one after the other.
    trace = made_trace([(0.0, 100, 11)] * 3)
    one_at_a_time = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=512)
    result = simulate_scheme(trace, config(scheduler=one_at_a_time, horizon_s=0.3), scheme)
    step_s, first_s = BASE_S + SEQUENCE_S, BASE_S + SEQUENCE_S + 100 / RATE
    done_s = first_s + 10 * step_s
    # The second got 4 tokens, the third waits: its time to first token is nobody's.
    assert (result.began, result.finished, result.num_steps) == (2, 1, 15)
    assert result.duration_s == pytest.approx(done_s + first_s + 3 * step_s)
    assert result.requests_per_s == pytest.approx(1 / result.duration_s)
    assert result.output_tokens_per_s == pytest.approx((11 + 4) / result.duration_s)
    assert result.ttft_s.p50 == pytest.approx((first_s + done_s + first_s) / 2)
    assert result.tpot_s.p99 == pytest.approx(step_s)


def test_a_run_that_idles_at_its_horizon_ends_there() -> None:
    trace = made_trace([(0.0, 10, 2), (5_000.0, 10, 2)])
    for scheme in SCHEMES:
        result = simulate_scheme(trace, config(horizon_s=50.0), scheme)
        assert (result.finished, result.num_steps, result.duration_s) == (1, 2, 50.0)


def test_a_horizon_before_the_first_token_gives_no_percentiles() -> None:
    result = simulate_scheme(made_trace([(10.0, 10, 2)]), config(horizon_s=5.0), "paged")
    assert result.finished == 0 and math.isnan(result.ttft_s.p50)
    assert result.share["free"] == 1.0


def test_forked_samples_take_less_memory_than_separate_requests() -> None:
    trace = made_trace([(0.0, 320, 20)] * 8)
    four = simulate_scheme(trace, config(num_blocks=2000, num_samples=4), "paged")
    separate = simulate_scheme(made_trace([(0.0, 320, 20)] * 32), config(num_blocks=2000), "paged")
    assert four.finished == separate.finished == 32
    assert four.saved_by_sharing > 0.6 and separate.saved_by_sharing == 0.0
    assert four.share["token_states"] < separate.share["token_states"] / 2


def test_progress_rises_to_the_share_of_requests_done() -> None:
    seen: list[tuple[str, float]] = []
    requests = busy_requests(300, rate_per_s=1.0)
    simulate_scheme(
        made_trace(requests), config(), "paged", lambda scheme, done: seen.append((scheme, done))
    )
    shares = [done for _, done in seen]
    assert {scheme for scheme, _ in seen} == {"paged"}
    assert len(shares) > 2 and shares == sorted(shares)
    assert shares[0] > 0 and shares[-1] <= 1


def test_a_memory_that_broke_a_law_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pagedkv.simulate.simulator.broken_laws", lambda memory, block_size: ["law 1: gone"]
    )
    with pytest.raises(BrokenLaw, match="law 1"):
        simulate_scheme(made_trace([(0.0, 1, 1)]), config(), "paged")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 0}, "the memory holds 0 blocks of 16 tokens"),
        ({"block_size": 0}, "block-size is 0"),
        ({"num_samples": 0}, "num-samples is 0"),
        ({"max_model_len": 0}, "max-model-len is 0"),
        ({"schemes": ("paged", "pages")}, "unknown scheme 'pages': choose from paged, "),
        ({"placement": "worst-fit"}, "unknown placement 'worst-fit': choose from first-fit, "),
        ({"num_samples": 65}, "65 samples of a prompt run at once, but max_num_seqs is 64"),
        ({"horizon_s": 0.0}, "duration is 0.0 s"),
        ({"horizon_s": math.nan}, "duration is nan s"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message.replace("(", r"\(")) as caught:
        config(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "max_num_batched_tokens is 8"),
        ({"watermark": 1.0}, "watermark is 1"),
        ({"watermark": -0.1}, "watermark is -0.1"),
        ({"watermark": math.nan}, "watermark is nan"),
    ],
)
def test_limits_out_of_range_are_refused_by_name(changes: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        SchedulerConfig(**changes)  # type: ignore[arg-type]


def test_the_curve_counts_blocks_of_ids_that_are_coarser_than_a_block() -> None:
    trace = made_trace(
        [(0.0, 64, 1), (1.0, 64, 1), (2.0, 40, 1)], ids=[[0, 1], [0, 2], [0, 1]], granularity=32
    )
    curve = trace_curve(trace, block_size=16)
    assert curve is not None
    assert (curve.block_size, curve.accesses, curve.distinct) == (32, 6, 3)
    assert curve.ceiling == pytest.approx(3 / 6)


def test_the_curve_counts_full_prompt_blocks_where_ids_go_on_over_the_answer() -> None:
    trace = made_trace(
        [(0.0, 40, 24), (1.0, 40, 24)], ids=[[0, 1], [0, 1]], granularity=32, covers_output=True
    )
    curve = trace_curve(trace, block_size=16)
    assert curve is not None
    assert (curve.block_size, curve.accesses, curve.distinct) == (16, 4, 2)


def test_the_curve_counts_full_blocks_of_finer_ids() -> None:
    trace = made_trace(
        [(0.0, 70, 5), (1.0, 70, 5), (2.0, 33, 5)],
        ids=[[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2]],
        granularity=16,
    )
    curve = trace_curve(trace, block_size=32)
    assert curve is not None
    assert (curve.block_size, curve.accesses, curve.distinct) == (32, 5, 2)
    assert curve.ceiling == pytest.approx(3 / 5)


def test_a_trace_without_ids_or_without_a_full_block_has_no_curve() -> None:
    assert trace_curve(made_trace([(0.0, 64, 1)]), block_size=16) is None
    short = made_trace([(0.0, 20, 1)], ids=[[0, 1]], granularity=16)
    assert trace_curve(short, block_size=32) is None


def test_where_nobody_is_admitted_there_is_no_hit_rate_rather_than_0() -> None:
    none_fits = simulate_scheme(busy_trace(20), config(max_model_len=1), "paged")
    assert len(none_fits.refused) == 20
    assert none_fits.hit_rate_first is None and none_fits.hit_rate_all is None
