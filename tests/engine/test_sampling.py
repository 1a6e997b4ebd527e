"""Which tokens are chosen: greedily, at random, under filters and penalties, in any company."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.sampling_model import distribution, penalised
from pagedkv.engine.largest import largest, largest_values
from pagedkv.engine.logprobs import log_probabilities, prompt_logprobs, token_logprobs
from pagedkv.engine.random_stream import random_words, request_seed, uniforms
from pagedkv.engine.sampling import NotFinite, SamplerState, adjust_logits, sample
from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.engine.token_counts import TokenCounts


def made_logits(num_rows: int, vocabulary: int, *, seed: int = 0, scale: float = 3) -> Any:
    numbers = np.random.default_rng(seed).normal(size=(num_rows, vocabulary)) * scale
    return numbers.astype(np.float32)


def state_of(params: SamplingParams, *, seed: int = 0, at: int = 0, **more: Any) -> SamplerState:
    """A state that is `at` tokens into its output."""
    state = SamplerState(params, seed=seed, **more)
    state.num_output_tokens = at
    return state


def draw(logits: Sequence[float], params: SamplingParams, count: int) -> Counter[int]:
    """Tokens drawn at `count` positions of one sequence, all by the same logits."""
    rows = np.tile(np.array(logits, dtype=np.float32), (count, 1))
    states = [state_of(params, seed=1, at=i) for i in range(count)]
    return Counter(sample(rows, states).token_ids.tolist())


def assert_drawn_by(counts: Counter[int], probabilities: Sequence[float]) -> None:
    """Pearson's chi-square test; a right sampler passes all but once in a million seeds."""
    total = counts.total()
    possible = [i for i, probability in enumerate(probabilities) if probability > 0]
    assert set(counts) <= set(possible)
    expected = [total * probabilities[i] for i in possible]
    assert min(expected) > 5
    chi_square = sum((counts[i] - e) ** 2 / e for i, e in zip(possible, expected))
    degrees = len(possible) - 1
    if degrees:
        # Wilson and Hilferty, 1931.
        spread = 2 / (9 * degrees)
        assert chi_square < degrees * (1 - spread + 4.75 * math.sqrt(spread)) ** 3


# Greedy


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = np.zeros((3, 100), dtype=np.float32)
    logits[0, [70, 30]] = 1
    logits[1, [99]] = 1
    greedy = SamplingParams(temperature=0)
    states = [state_of(greedy) for _ in range(3)]
    assert sample(logits, states).token_ids.tolist() == [30, 99, 0]


def test_greedy_breaks_ties_as_torch_does() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    logits = np.random.default_rng(0).integers(0, 3, size=(40, 1000)).astype(np.float32)
    states = [state_of(SamplingParams(temperature=0)) for _ in range(40)]
    tensor = torch.from_numpy(logits)
    assert sample(tensor, states).token_ids.tolist() == tensor.argmax(-1).tolist()


def test_logits_stay_as_they_are() -> None:
    logits = made_logits(2, 300)
    before = logits.copy()
    params = SamplingParams(top_k=5, presence_penalty=1, logit_bias={3: 5.0}, min_tokens=2)
    states = [SamplerState(params, seed=i, end_ids=[7]) for i in range(2)]
    states[0].append(5)
    sample(logits, states)
    assert np.array_equal(logits, before)


# Filters


@given(
    data=st.data(),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.3, 1.0, 1.7]),
        top_k=st.sampled_from([0, 1, 2, 3, 7, 1000]),
        top_p=st.sampled_from([0.05, 0.4, 0.7, 0.95, 1.0]),
        min_p=st.sampled_from([0.0, 0.04, 0.3, 1.0]),
    ),
)
def test_every_number_drawn_gives_the_token_that_the_model_gives(
    data: st.DataObject, params: SamplingParams
) -> None:
    """Few different logits, so that ties are everywhere."""
    size = data.draw(st.integers(1, 80))
    values = st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.5])
    logits = data.draw(st.lists(values, min_size=size, max_size=size))
    expected = distribution(logits, params)
    possible = {i for i, probability in enumerate(expected) if probability > 0}
    counts = draw(logits, params, 400)
    # Sums of float32 may put a token that is right on top_p's edge on either side.
    for nudge in (1 - 1e-6, 1 + 1e-6):
        top_p = min(1.0, params.top_p * nudge) if params.top_p < 1 else 1.0
        min_p = min(1.0, params.min_p * nudge)
        nudged = SamplingParams(
            temperature=params.temperature, top_k=params.top_k, top_p=top_p, min_p=min_p
        )
        possible |= {i for i, p in enumerate(distribution(logits, nudged)) if p > 0}
    assert set(counts) <= possible
    likely = {i for i, probability in enumerate(expected) if probability > 0.1}
    assert likely <= set(counts)


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"top_k": 6, "top_p": 0.7, "min_p": 0.1, "temperature": 1.3},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_tokens_are_drawn_as_often_as_they_should_be(options: dict[str, Any]) -> None:
    logits = made_logits(1, 12, seed=3, scale=0.4)[0].tolist()
    params = SamplingParams(**options)
    assert_drawn_by(draw(logits, params, 20_000), distribution(logits, params))


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_a_long_row_is_drawn_from_like_a_short_one(options: dict[str, Any]) -> None:
    """40,003 tokens in no whole number of blocks, of which twelve are possible."""
    short = made_logits(1, 12, seed=3, scale=0.4)[0]
    long = np.full(40_003, -np.inf, dtype=np.float32)
    places = np.sort(np.random.default_rng(5).choice(len(long), 12, replace=False))
    places[-1] = len(long) - 1
    long[places] = short
    params = SamplingParams(**options)
    states = [state_of(params, seed=1, at=i) for i in range(1000)]
    counts: Counter[int] = Counter()
    for start in range(0, 1000, 50):
        rows = np.broadcast_to(long, (50, len(long)))
        counts.update(sample(rows, states[start : start + 50]).token_ids.tolist())
    by_place = Counter({int(np.searchsorted(places, i)): times for i, times in counts.items()})
    assert set(counts) <= set(places.tolist())
    probabilities = distribution(short.tolist(), params)
    for i, probability in enumerate(probabilities):
        deviation = math.sqrt(1000 * probability * (1 - probability)) + 1
        assert abs(by_place[i] - 1000 * probability) < 5 * deviation


@pytest.mark.parametrize("step", [0.1, 0.5])
@pytest.mark.parametrize(
    "options",
    [{"top_p": 0.9}, {"top_k": 3000}, {"top_k": 5, "top_p": 0.9}, {"top_k": 200, "top_p": 0.3}],
    ids=str,
)
def test_filters_that_keep_more_than_the_candidates_look_at_all(
    options: dict[str, Any], step: float
) -> None:
    """Flat logits full of ties: what is kept does not end among the first few hundred."""
    logits = (np.round(made_logits(1, 20_000, scale=0.5)[0] / step) * step).astype(np.float32)
    params = SamplingParams(**options)
    expected = np.array(distribution(logits.tolist(), params))
    rows = np.broadcast_to(logits, (300, len(logits)))
    drawn = sample(rows, [state_of(params, seed=2, at=i) for i in range(300)]).token_ids
    assert (expected[drawn] > 0).all()
    # The number drawn says how likely all tokens are that rank before the one it gives.
    ranked = np.lexsort((np.arange(len(logits)), -logits))
    ends = expected[ranked].cumsum()
    numbers = uniforms(*(np.array(x, np.uint64) for x in ([2] * 300, [0] * 300, range(300))))
    by_hand = ranked[np.searchsorted(ends, numbers, side="right")]
    assert np.mean(by_hand == drawn) > 0.97  # rounding may move it by one


def test_filters_keep_what_those_of_transformers_keep() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = made_logits(1, 60, seed=8, scale=2)
    for temperature, top_k, top_p, min_p in [
        (0.7, 20, 0.9, 0.02),
        (1.4, 50, 0.6, 0.0),
        (1.0, 60, 0.95, 0.1),
        (2.0, 5, 1.0, 0.05),
    ]:
        scores = torch.from_numpy(logits)
        for warper in (
            process.TemperatureLogitsWarper(temperature),
            process.TopKLogitsWarper(top_k),
            process.TopPLogitsWarper(top_p),
            process.MinPLogitsWarper(min_p),
        ):
            scores = warper(None, scores)
        theirs = scores.softmax(-1)[0].tolist()
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        assert distribution(logits[0].tolist(), params) == pytest.approx(theirs, abs=1e-6)


def test_temperatures_near_0_and_very_high_do_no_harm() -> None:
    logits = made_logits(1, 50)
    logits[0, 3] = -np.inf
    cold = SamplingParams(temperature=1e-300)
    hot = SamplingParams(temperature=1e300)
    for params in (cold, SamplingParams(temperature=1e-300, top_p=0.5)):
        assert sample(logits, [state_of(params)]).token_ids[0] == logits[0].argmax()
    counts = draw(logits[0].tolist(), hot, 2000)
    assert set(counts) == set(range(50)) - {3}


def test_a_token_of_probability_0_is_never_drawn() -> None:
    logits = [-math.inf, 0.0, -math.inf, -math.inf, 0.0, -math.inf]
    for options in ({}, {"top_p": 0.99}, {"top_k": 5}, {"top_p": 0.999, "top_k": 6}):
        assert set(draw(logits, SamplingParams(**options), 3000)) == {1, 4}


@pytest.mark.parametrize("options", [{}, {"min_p": 0.5}, {"top_p": 0.999}, {"top_k": 7}], ids=str)
@pytest.mark.parametrize("number, token_id", [(0.0, 3), (1 - 2.0**-53, 41)])
def test_the_smallest_and_the_largest_number_give_the_first_and_the_last_token(
    options: dict[str, Any], number: float, token_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = np.full((2, 60), -np.inf, dtype=np.float32)
    logits[:, [3, 5, 41]] = 0.1
    monkeypatch.setattr("pagedkv.engine.sampling.uniforms", lambda *_: np.full(2, number))
    states = [state_of(SamplingParams(**options)) for _ in range(2)]
    (found,) = {int(i) for i in sample(logits, states).token_ids}
    assert found in (3, 5, 41)
    if "top_p" in options or "top_k" in options:  # else blocks, no runs of neighbours, come first
        assert found == token_id


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_reported_by_row(temperature: float, broken: float) -> None:
    logits = made_logits(3, 100)
    logits[1, 60] = broken
    states = [state_of(SamplingParams(temperature=temperature)) for _ in range(3)]
    with pytest.raises(NotFinite, match="NaN or infinite") as raised:
        sample(logits, states)
    assert raised.value.rows == [1]


# Random numbers


def test_random_words_are_those_of_philox() -> None:
    """The known answers that its authors publish, of key, counter and first two words."""
    words = random_words(
        np.array([0, 2**64 - 1, 0x299F31D0A4093822], dtype=np.uint64),
        np.array([0, 2**64 - 1, 0x0370734413198A2E], dtype=np.uint64),
        np.array([0, 2**64 - 1, 0x85A308D3243F6A88], dtype=np.uint64),
    )
    assert [f"{int(word):016x}" for word in words] == [
        "e169c58d6627e8d5",
        "41c83b0e408f276d",
        "94fdccebd16cfe09",
    ]


def test_requests_without_a_seed_get_different_ones() -> None:
    seeds = {request_seed(engine, request) for engine in range(5) for request in range(100)}
    assert len(seeds) == 500
    assert request_seed(0, 7) == request_seed(0, 7)
    # None is a number that a sample draws whose seed is the engine's.
    engines, requests = np.full(100, 3, np.uint64), np.arange(100, dtype=np.uint64)
    for stream in range(4):
        drawn = random_words(engines, np.full(100, stream, np.uint64), requests)
        assert not seeds.intersection(drawn.tolist())


COMPANY = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9, logprobs=3),
    SamplingParams(top_k=20, presence_penalty=0.5),
    SamplingParams(min_p=0.1, repetition_penalty=1.3, logprobs=20),
    SamplingParams(temperature=1.2, top_k=300, top_p=0.99),
    SamplingParams(temperature=0, frequency_penalty=1.0, logit_bias={4: 2.0}, logprobs=0),
]


@pytest.mark.parametrize("vocabulary", [5, 31, 1000, 20_011])
def test_a_choice_does_not_depend_on_the_company_or_the_place_in_it(vocabulary: int) -> None:
    count = 3 * len(COMPANY)
    logits = made_logits(count, vocabulary, scale=1)

    def state(i: int) -> SamplerState:
        made = SamplerState(COMPANY[i % len(COMPANY)], range(min(vocabulary, 40)), seed=i)
        for token_id in range(i):
            made.append(token_id % vocabulary)
        return made

    alone = [sample(logits[i : i + 1], [state(i)]) for i in range(count)]
    for order in (np.arange(count), np.random.default_rng(1).permutation(count)):
        together = sample(logits[order], [state(i) for i in order])
        for place, i in enumerate(order):
            assert together.token_ids[place] == alone[i].token_ids[0]
            assert together.logprobs[place] == alone[i].logprobs[0]


def test_a_sequence_draws_the_same_after_a_preemption_whatever_ran_in_between() -> None:
    params = SamplingParams(temperature=1.5)
    logits = made_logits(20, 500)

    def run(interrupted: bool) -> list[int]:
        state = SamplerState(params, seed=9)
        found = []
        for step in range(20):
            if interrupted and step % 3 == 0:
                sample(logits, [SamplerState(params, seed=i) for i in range(20)])
            token_id = int(sample(logits[step : step + 1], [state]).token_ids[0])
            state.append(token_id)
            found.append(token_id)
        return found

    assert run(interrupted=False) == run(interrupted=True)


def test_samples_of_one_prompt_go_different_ways() -> None:
    logits = np.zeros((8, 1000), dtype=np.float32)
    states = [SamplerState(SamplingParams(n=8), seed=5, sample=i) for i in range(8)]
    assert len(set(sample(logits, states).token_ids.tolist())) == 8


def test_streams_of_neighbouring_seeds_and_samples_are_independent() -> None:
    """Pairs of numbers from two streams fall evenly into the cells of a 4 x 4 board."""
    count = 16_000
    positions = np.arange(count, dtype=np.uint64)

    def stream(seed: int, sample_number: int) -> Any:
        return uniforms(
            np.full(count, seed, dtype=np.uint64),
            np.full(count, sample_number, dtype=np.uint64),
            positions,
        )

    first = stream(1, 0)
    for other in (stream(2, 0), stream(1, 1), np.roll(first, 1)):
        cells = Counter((np.floor(first * 4) * 4 + np.floor(other * 4)).astype(int).tolist())
        assert_drawn_by(cells, [1 / 16] * 16)


# Penalties, bias, min_tokens


@given(
    prompt_ids=st.lists(st.integers(0, 11), max_size=12),
    output_ids=st.lists(st.integers(0, 11), max_size=30),
    params=st.builds(
        SamplingParams,
        temperature=st.just(0.0),
        repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
        presence_penalty=st.sampled_from([0.0, -1.0, 0.7]),
        frequency_penalty=st.sampled_from([0.0, 0.3, -0.2]),
        logit_bias=st.sampled_from([None, {3: 1.5, 9: -4.0, 50: 3.0}]),
    ),
    seed=st.integers(0, 1000),
)
def test_penalties_are_those_of_an_obvious_count(
    prompt_ids: list[int], output_ids: list[int], params: SamplingParams, seed: int
) -> None:
    logits = made_logits(1, 10, seed=seed)  # two of the tokens are not in the vocabulary
    state = SamplerState(params, prompt_ids, seed=0)
    for token_id in output_ids:
        state.append(token_id)
    expected = penalised(logits[0].tolist(), params, prompt_ids, output_ids)
    # In company, whose rows must not get in the way.
    company = [SamplerState(SamplingParams(logit_bias={2: -9}), seed=1), state]
    adjusted = adjust_logits(np.concatenate([made_logits(1, 10), logits]), company)
    assert adjusted[1].tolist() == pytest.approx(expected, abs=1e-5)


def test_repetition_is_penalised_as_in_transformers() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    process = pytest.importorskip("transformers.generation.logits_process")
    sequences = np.random.default_rng(2).integers(0, 40, size=(50, 30))
    logits = made_logits(50, 40, scale=1)
    penalise = process.RepetitionPenaltyLogitsProcessor(1.7)
    theirs = penalise(torch.from_numpy(sequences), torch.from_numpy(logits.copy()))
    params = SamplingParams(temperature=0, repetition_penalty=1.7)
    states = []
    for row in sequences.tolist():
        states.append(SamplerState(params, row[:10], seed=0))
        for token_id in row[10:]:
            states[-1].append(token_id)
    assert adjust_logits(logits, states).tolist() == theirs.tolist()


@given(st.lists(st.integers(0, 300), max_size=50), st.lists(st.integers(0, 300), max_size=400))
def test_counts_kept_along_the_way_are_those_of_a_recount(
    prompt_ids: list[int], output_ids: list[int]
) -> None:
    counts = TokenCounts(prompt_ids)
    for token_id in output_ids:
        counts.append(token_id)
    expected = Counter(output_ids)
    assert dict(zip(counts.token_ids.tolist(), counts.output_counts.tolist())) == {
        token_id: expected[token_id] for token_id in {*prompt_ids, *output_ids}
    }


def test_end_tokens_are_barred_until_min_tokens() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[4])
    logits = np.array([[0.0, 1.0, 2.0, 3.0, 5.0, 4.0]], dtype=np.float32)
    state = SamplerState(params, seed=0, end_ids=[5, 99])
    chosen = []
    for _ in range(3):
        chosen.append(int(sample(logits, [state]).token_ids[0]))
        state.append(chosen[-1])
    assert chosen == [3, 3, 4]


# Log probabilities


def log_softmax(logits: Any) -> Any:
    exact = logits.astype(np.float64)
    return (
        exact
        - np.log(np.exp(exact - exact.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - (exact.max(-1, keepdims=True))
    )


def test_the_log_probabilities_of_all_tokens_are_those_of_a_softmax() -> None:
    logits = made_logits(3, 1001)
    logits[1, 5] = -np.inf
    expected = log_softmax(logits)
    np.testing.assert_allclose(log_probabilities(logits), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocabulary", [7, 500, 3001])
def test_logprobs_are_those_of_the_model_before_anything_is_done_to_them(vocabulary: int) -> None:
    logits = made_logits(4, vocabulary)
    params = SamplingParams(temperature=0.5, top_k=3, presence_penalty=2, logprobs=5)
    states = [SamplerState(params, seed=i) for i in range(4)]
    for state in states:
        state.append(int(logits[0].argmax()))
    sampled = sample(logits, states)
    expected = log_softmax(logits)
    for row, logprob in enumerate(sampled.logprobs):
        assert logprob is not None
        assert logprob.token_id == sampled.token_ids[row]
        assert logprob.logprob == pytest.approx(expected[row, logprob.token_id], abs=1e-5)
        assert logprob.rank == 1 + (logits[row] > logits[row, logprob.token_id]).sum()
        likeliest = np.argsort(-logits[row])[:5]
        assert [token_id for token_id, _ in logprob.top] == likeliest.tolist()
        found = [value for _, value in logprob.top]
        assert found == pytest.approx(expected[row, likeliest].tolist(), abs=1e-5)


def test_only_the_rows_that_ask_get_logprobs_and_only_as_many_as_they_ask_for() -> None:
    numbers = [None, 0, 20, 3]
    states = [state_of(SamplingParams(temperature=0, logprobs=number)) for number in numbers]
    found = sample(made_logits(4, 15), states).logprobs
    assert [None if entry is None else len(entry.top) for entry in found] == [None, 0, 15, 3]


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_prompt_logprobs_are_the_same_in_any_chunks(chunk: int) -> None:
    prompt_ids = [4, 8, 15, 16, 23, 42, 0]
    logits = made_logits(len(prompt_ids), 50)
    found = []
    for start in range(0, len(prompt_ids), chunk):
        rows = logits[start : start + chunk]
        found += prompt_logprobs(rows, prompt_ids, start=start, num_top=2)
    assert [entry.token_id for entry in found] == prompt_ids[1:]
    expected = log_softmax(logits)
    for position, entry in enumerate(found):
        wanted = expected[position, prompt_ids[position + 1]]
        assert entry.logprob == pytest.approx(wanted, abs=1e-5)
        assert len(entry.top) == 2


def test_long_prompts_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = made_logits(10, 64)
    whole = token_logprobs(logits, range(10), [4] * 10)
    monkeypatch.setattr("pagedkv.engine.logprobs._ENTRIES_AT_ONCE", 200)
    assert token_logprobs(logits, range(10), [4] * 10) == whole


# The largest entries


@given(
    width=st.sampled_from([1, 31, 32, 33, 640, 700, 4099]),
    k=st.sampled_from([1, 3, 20, 256]),
    kind=st.sampled_from(["different", "few", "equal"]),
    seed=st.integers(0, 100),
)
def test_the_largest_entries_are_those_of_a_sort(width: int, k: int, kind: str, seed: int) -> None:
    make: dict[str, Callable[[], Any]] = {
        "different": lambda: made_logits(3, width, seed=seed),
        "few": lambda: np.round(made_logits(3, width, seed=seed)),
        "equal": lambda: np.zeros((3, width), dtype=np.float32),
    }
    rows = make[kind]()
    expected = -np.sort(-rows, axis=1)[:, :k]
    assert np.array_equal(largest_values(rows, k), expected)
    values, places = largest(rows, k)
    assert np.array_equal(values, expected)
    assert np.array_equal(np.take_along_axis(rows, places, 1), expected)
    for found, row in zip(values.tolist(), places.tolist()):
        order = [(-value, place) for value, place in zip(found, row)]
        assert order == sorted(set(order))
