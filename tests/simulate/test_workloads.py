"""The built-in workloads have the published figures, and the same seed gives the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.errors import InvalidInput
from pagedkv.simulate.trace import Trace
from pagedkv.simulate.trace_formats import read_trace
from pagedkv.simulate.workloads import (
    ARRIVALS,
    CHAT_GRANULARITY,
    CHAT_MAX_TOKENS,
    CHAT_SYSTEM_TOKENS,
    WORKLOADS,
    make_workload,
)

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"
MANY = 200_000


def size_biased_mean(tokens: np.ndarray) -> float:
    return float((tokens.astype(float) ** 2).mean() / tokens.mean())


def columns_of(trace: Trace) -> list[bytes]:
    names = ("arrival_s", "prompt_tokens", "output_tokens", "session", "prefix_ids")
    return [getattr(trace, name).tobytes() for name in names]


@pytest.mark.parametrize("name", [n for n, w in WORKLOADS.items() if w.mean_prompt_tokens])
def test_the_mean_lengths_are_the_published_ones(name: str) -> None:
    trace = make_workload(name, num_requests=MANY, seed=1)
    assert trace.prompt_tokens.mean() == pytest.approx(WORKLOADS[name].mean_prompt_tokens, rel=0.02)
    assert trace.output_tokens.mean() == pytest.approx(WORKLOADS[name].mean_output_tokens, rel=0.03)


@pytest.mark.parametrize(
    ("name", "prompt_median", "prompt_p90", "output_median", "output_p90"),
    [("azure-conversation", 1020, 2734, 129, 424), ("azure-code", 1469, 5186, 13, 55)],
)
def test_the_azure_quantiles_are_the_published_ones(
    name: str, prompt_median: int, prompt_p90: int, output_median: int, output_p90: int
) -> None:
    trace = make_workload(name, num_requests=MANY, seed=2)
    prompt = np.percentile(trace.prompt_tokens, [50, 90])
    output = np.percentile(trace.output_tokens, [50, 90])
    assert prompt == pytest.approx([prompt_median, prompt_p90], rel=0.03)
    assert output == pytest.approx([output_median, output_p90], rel=0.05)


@pytest.mark.parametrize(
    ("name", "file"), [("azure-conversation", "azure_conv.csv"), ("azure-code", "azure_code.csv")]
)
def test_the_azure_workloads_follow_the_real_traces_at_every_quantile(name: str, file: str) -> None:
    if not (TRACES / file).exists():
        pytest.skip(f"needs the real trace {file}")
    real = read_trace(str(TRACES / file))
    drawn = make_workload(name, num_requests=MANY, seed=3)
    for column in ("prompt_tokens", "output_tokens"):
        ours, theirs = np.sort(getattr(drawn, column)), np.sort(getattr(real, column))
        levels = np.unique(theirs)
        gap = np.abs(
            np.searchsorted(ours, levels, "right") / len(ours)
            - np.searchsorted(theirs, levels, "right") / len(theirs)
        )
        assert gap.max() < 0.06, column  # Kolmogorov-Smirnov distance


def test_sharegpt_has_the_spread_that_the_papers_memory_figures_imply() -> None:
    trace = make_workload("sharegpt", num_requests=MANY, seed=4)
    output = trace.output_tokens
    assert (output.std() / output.mean()) ** 2 == pytest.approx(0.77, rel=0.05)
    assert size_biased_mean(output) / 2 == pytest.approx(299, rel=0.03)
    assert (trace.prompt_tokens + output).max() <= 2048
    assert (trace.prompt_tokens + output == 2048).mean() < 2e-4  # drawn again, not cut to fit
    # Weighted by how long requests run, prompts are still as long as they are on average.
    weighted = (trace.prompt_tokens * output).mean() / output.mean()
    assert weighted == pytest.approx(161, rel=0.05)


def test_alpaca_outputs_vary_as_in_the_data_set() -> None:
    trace = make_workload("alpaca", num_requests=MANY, seed=5)
    assert 110 < size_biased_mean(trace.output_tokens) < 140


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_requests_arrive_at_the_rate_that_was_asked_for(name: str, arrivals: str) -> None:
    # Of conversations, each brings several requests, so their number varies more.
    trace = make_workload(name, num_requests=30_000, rate_per_s=7.5, arrivals=arrivals, seed=6)
    assert len(trace) == 30_000
    assert 30_000 / trace.arrival_s[-1] == pytest.approx(7.5, rel=0.1)
    by_time = make_workload(name, duration_s=4_000, rate_per_s=7.5, arrivals=arrivals, seed=6)
    assert len(by_time) == pytest.approx(30_000, rel=0.1)
    assert by_time.arrival_s[-1] < 4_000


@pytest.mark.parametrize("name", [n for n, w in WORKLOADS.items() if w.lengths])
def test_gaps_vary_as_poisson_or_as_the_burstiness_says(name: str) -> None:
    def variation(**how: object) -> float:
        trace = make_workload(name, num_requests=100_000, rate_per_s=3.0, seed=7, **how)
        gaps = np.diff(trace.arrival_s)
        return float(gaps.std() / gaps.mean())

    assert variation() == pytest.approx(1.0, rel=0.02)
    assert variation(arrivals="bursty") == pytest.approx(3.0, rel=0.05)
    assert variation(arrivals="bursty", burstiness_cv=1.5) == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(name: str) -> None:
    first, again, other = (make_workload(name, num_requests=500, seed=s) for s in (11, 11, 12))
    assert columns_of(first) == columns_of(again)
    assert columns_of(first) != columns_of(other)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(WORKLOADS)),
    num_requests=st.integers(1, 300),
    rate_per_s=st.floats(0.01, 1000),
    arrivals=st.sampled_from(ARRIVALS),
    seed=st.integers(0, 2**64),
)
def test_every_workload_is_a_valid_trace(
    name: str, num_requests: int, rate_per_s: float, arrivals: str, seed: int
) -> None:
    trace = make_workload(
        name, num_requests=num_requests, rate_per_s=rate_per_s, arrivals=arrivals, seed=seed
    )
    assert len(trace) == num_requests
    assert trace.arrival_s[0] == 0 and np.all(np.diff(trace.arrival_s) >= 0)
    assert trace.prompt_tokens.min() >= 1 and trace.output_tokens.min() >= 1
    for column in ("prompt_tokens", "output_tokens", "session", "prefix_ids", "prefix_offsets"):
        assert getattr(trace, column).dtype == np.int64
    assert len(trace.prefix_offsets) == num_requests + 1
    assert trace.prefix_offsets[-1] == len(trace.prefix_ids)
    if trace.has_prefix_ids:
        assert np.array_equal(
            np.diff(trace.prefix_offsets), -(-trace.prompt_tokens // trace.granularity)
        )


def test_the_first_duration_in_which_nothing_more_comes_still_has_its_first_request() -> None:
    assert len(make_workload("alpaca", duration_s=1e-6, rate_per_s=0.001)) == 1
    assert len(make_workload("chat", duration_s=1e-6, rate_per_s=0.001)) == 1


def test_a_chat_turn_begins_with_the_system_prompt_and_all_of_its_conversation() -> None:
    """Ids of whole blocks are equal exactly where the tokens before and in them are."""
    trace = make_workload("chat", num_requests=3_000, rate_per_s=2.0, seed=8)
    last_of: dict[int, int] = {}
    owner: dict[int, int] = {}
    messages = []
    for i in range(len(trace)):
        ids = trace.prefix_ids[trace.prefix_offsets[i] : trace.prefix_offsets[i + 1]].tolist()
        system = CHAT_SYSTEM_TOKENS // CHAT_GRANULARITY
        session = int(trace.session[i])
        assert ids[:system] == list(range(system))
        for own in ids[system:]:  # of no other conversation
            assert owner.setdefault(own, session) == session
        if session in last_of:
            before = last_of[session]
            earlier = trace.prefix_ids[
                trace.prefix_offsets[before] : trace.prefix_offsets[before + 1]
            ].tolist()
            whole = int(trace.prompt_tokens[before]) // CHAT_GRANULARITY
            assert ids[:whole] == earlier[:whole]
            assert not set(earlier[whole:]) & set(ids)  # what was partial is another block now
            # History: the earlier prompt, its answer, and a new message.
            grown = trace.prompt_tokens[before] + trace.output_tokens[before]
            messages.append(int(trace.prompt_tokens[i] - grown))
        last_of[session] = i
    assert len(messages) > 1_500 and min(messages) >= 1
    assert trace.prompt_tokens.min() > CHAT_SYSTEM_TOKENS  # the first message is there too
    assert np.mean(messages) == pytest.approx(94.46, rel=0.1)
    assert (trace.prompt_tokens + trace.output_tokens).max() <= CHAT_MAX_TOKENS


def test_chat_has_the_turns_and_answers_of_sharegpt() -> None:
    trace = make_workload("chat", num_requests=60_000, rate_per_s=5.0, seed=9)
    _, turns = np.unique(trace.session, return_counts=True)
    assert turns.mean() == pytest.approx(3.51, rel=0.04)
    assert trace.output_tokens.mean() == pytest.approx(348.45, rel=0.03)
    assert trace.output_tokens.std() == pytest.approx(269.93, rel=0.05)


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "sharegtp"},
        {"num_requests": 0},
        {"num_requests": 10**9},
        {"num_requests": None},
        {"duration_s": 10.0},
        {"num_requests": None, "duration_s": 0.0},
        {"num_requests": None, "duration_s": float("nan")},
        {"num_requests": None, "duration_s": float("inf")},
        {"rate_per_s": 0.0},
        {"rate_per_s": 1e-300},
        {"rate_per_s": 1e300},
        {"rate_per_s": 1e9},
        {"rate_per_s": float("nan")},
        {"rate_per_s": float("inf")},
        {"arrivals": "regular"},
        {"burstiness_cv": 0.0},
        {"burstiness_cv": float("nan")},
        {"seed": -1},
    ],
    ids=str,
)
def test_an_argument_out_of_range_is_refused_in_one_line(wrong: dict[str, object]) -> None:
    arguments: dict[str, object] = {"name": "chat", "num_requests": 10} | wrong
    name = str(arguments.pop("name"))
    with pytest.raises(InvalidInput) as caught:
        make_workload(name, **arguments)
    assert "\n" not in str(caught.value)


def test_the_warm_up_of_conversations_is_no_way_around_the_most_requests() -> None:
    with pytest.raises(
        InvalidInput, match="a rate of 1e\\+06 requests a second: the 900 s of conv"
    ):
        make_workload("chat", num_requests=5, rate_per_s=1e6)
    assert len(make_workload("alpaca", num_requests=5, rate_per_s=1e6)) == 5


def test_every_workload_says_where_its_figures_come_from() -> None:
    for name, workload in WORKLOADS.items():
        assert workload.name == name
        assert workload.source and "\n" not in workload.description
