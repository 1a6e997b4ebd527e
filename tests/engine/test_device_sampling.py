"""Tokens chosen where the logits lie are those that the host chooses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("transformers", reason="needs the extra [engine]")

import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.engine import device_sampling
from pagedkv.engine.device_sampling import MARGIN, choose_greedily, sample_on_device
from pagedkv.engine.sampling import NotFinite, SamplerState, sample
from pagedkv.engine.sampling_params import SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@st.composite
def a_choice(draw: st.DrawFn) -> dict[str, Any]:
    """Parameters of one row."""
    options: dict[str, Any] = {"temperature": draw(st.sampled_from([0, 0.01, 0.7, 1.0, 5.0]))}
    if draw(st.booleans()):
        options["top_k"] = draw(st.sampled_from([1, 3, 50, 300]))
    if draw(st.booleans()):
        options["top_p"] = draw(st.sampled_from([0.05, 0.5, 0.9, 0.999]))
    if draw(st.booleans()):
        options["min_p"] = draw(st.sampled_from([0.01, 0.2, 0.9]))
    if draw(st.integers(0, 3)) == 0:
        options |= draw(
            st.sampled_from(
                [{"logprobs": 2}, {"repetition_penalty": 1.4}, {"logit_bias": {3: 5.0}}]
            )
        )
    return options


@given(
    choices=st.lists(a_choice(), min_size=1, max_size=6),
    vocabulary=st.sampled_from([5, 64, 513, 20_001]),
    spread=st.sampled_from([0.0, 0.1, 1.0, 4.0, 30.0]),
    levels=st.sampled_from([0, 3]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 2**32),
)
def test_every_row_gets_the_token_that_the_host_draws(
    choices: list[dict[str, Any]],
    vocabulary: int,
    spread: float,
    levels: int,
    dtype: str,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(0, spread, (len(choices), vocabulary)).astype(np.float32)
    if levels:
        rows = np.round(rows / (spread or 1) * levels)  # many are equal
    rows[rng.random(rows.shape) < 0.1] = -np.inf
    rows[:, rng.integers(vocabulary)] = spread
    logits = torch.from_numpy(rows).to(DEVICE, getattr(torch, dtype))
    states = []
    for i, options in enumerate(choices):
        state = SamplerState(SamplingParams(**options), [1, 2], seed=seed, sample=i)
        state.append(3 % vocabulary)
        states.append(state)
    expected = sample(logits.float().cpu().numpy(), states)
    found = sample_on_device(logits, states)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.logprobs == expected.logprobs


def test_most_rows_of_a_peaked_distribution_never_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 4, (400, 20_001)).astype(np.float32)).to(DEVICE)
    crossed: list[int] = []

    def counted(rows: Any, states: Any) -> Any:
        crossed.append(len(states))
        return sample(rows, states)

    monkeypatch.setattr(device_sampling, "sample", counted)
    for options in ({}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}):
        params = SamplingParams(temperature=0.8, **options)
        sample_on_device(logits, [SamplerState(params, seed=i) for i in range(400)])
    assert sum(crossed) < 0.2 * 1600


def test_a_number_near_the_end_of_a_tokens_share_goes_to_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.zeros(1, 4, device=DEVICE)  # each has a quarter
    states = [SamplerState(SamplingParams(temperature=1), seed=1)]
    drawn = device_sampling._draw_from_all
    for uniform, is_clear in ((0.25 + MARGIN / 2, False), (0.25 - MARGIN / 2, False), (0.3, True)):
        draws = device_sampling.draws_of(states, np.zeros(1, np.float32), 4)
        found = drawn(logits, draws._replace(uniform=np.array([uniform])))
        assert (found[0] >= 0) == is_clear


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_p": 0.5}, {"logprobs": 1}, {}])
def test_rows_without_a_largest_number_are_named(options: dict[str, Any]) -> None:
    logits = torch.zeros(3, 9, device=DEVICE)
    logits[1, 4] = torch.nan
    states = [SamplerState(SamplingParams(**options), seed=i) for i in range(3)]
    with pytest.raises(NotFinite) as failure:
        sample_on_device(logits, states)
    assert failure.value.rows == [1]


@given(st.integers(0, 2**32), st.integers(1, 9), st.sampled_from([5, 64, 513]))
def test_the_likeliest_is_the_first_of_several(seed: int, rows: int, vocabulary: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.integers(-3, 3, (rows, vocabulary)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.2] = -np.inf
    logits[:, rng.integers(vocabulary)] = 2
    states = [SamplerState(SamplingParams(temperature=0), seed=0) for _ in range(rows)]
    token_ids, is_finite = choose_greedily(torch.from_numpy(logits).to(DEVICE))
    assert token_ids.tolist() == sample(logits, states).token_ids.tolist()
    assert is_finite.all()
    logits[0, 0], logits[-1, -1] = np.nan, np.inf
    assert not choose_greedily(torch.from_numpy(logits).to(DEVICE))[1][[0, -1]].any()
