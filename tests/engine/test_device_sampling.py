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
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from pagedkv.engine import device_counts, device_logprobs, device_sampling
from pagedkv.engine.device_sampling import FINE_MARGIN, MARGIN, Choice, DeviceSampler
from pagedkv.engine.logprobs import TokenLogprob
from pagedkv.engine.sampling import NotFinite, SamplerState, sample
from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.engine.turn import Turn

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
    if draw(st.integers(0, 2)) == 0:
        options["logprobs"] = draw(st.sampled_from([0, 2]))
    if draw(st.integers(0, 2)) == 0:
        options |= draw(
            st.sampled_from(
                [
                    {"repetition_penalty": 1.4},
                    {"frequency_penalty": 0.7, "presence_penalty": -1.1},
                    {"repetition_penalty": 0.6, "frequency_penalty": 1.9},
                    {"logit_bias": {3: 5.0, 4: -1.25, 10**6: 2.0}},
                    {"min_tokens": 2, "stop_token_ids": [0, 3, 10**6]},
                    {"min_tokens": 5, "logit_bias": {0: 9.0}, "presence_penalty": 1.5},
                ]
            )
        )
    return options


def some_logits(seed: int, rows: int, vocabulary: int, spread: float, levels: int) -> Any:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, spread, (rows, vocabulary)).astype(np.float32)
    if levels:
        logits = np.round(logits / (spread or 1) * levels)  # many are equal
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[:, rng.integers(vocabulary)] = spread
    return logits


def on_device(logits: NDArray[np.float32], dtype: str = "float32") -> torch.Tensor:
    return torch.from_numpy(logits).to(DEVICE, getattr(torch, dtype))


def all_of(choice: Choice) -> device_sampling.Concluded:
    return choice.conclude(np.arange(len(choice.turns)))


def assert_alike(
    found: TokenLogprob | None, expected: TokenLogprob | None, logits: NDArray[np.float32]
) -> None:
    """The same tokens, but for the order of equal ones, and the same numbers in float32."""
    assert (found is None) == (expected is None)
    if found is None or expected is None:
        return
    assert (found.token_id, found.rank) == (expected.token_id, expected.rank)
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-5, rel=1e-6)
    assert [logits[i] for i, _ in found.top] == [logits[i] for i, _ in expected.top]
    for (_, mine), (_, theirs) in zip(found.top, expected.top, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5, rel=1e-6)


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
    logits = on_device(some_logits(seed, len(choices), vocabulary, spread, levels), dtype)
    there = logits.float().cpu().numpy()
    states = []
    for i, options in enumerate(choices):
        state = SamplerState(
            SamplingParams(max_tokens=9, **options), [1, 2, 1], seed=seed, sample=i, end_ids=[1]
        )
        state.append(3 % vocabulary)
        states.append(state)
    sampler = DeviceSampler(torch.device(DEVICE))
    for _ in range(2):  # the second time what was found to be wide is sorted whole
        expected = sample(there, states)
        found = all_of(sampler.choose(logits, [Turn(state) for state in states]))
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        for mine, theirs, row in zip(found.logprobs, expected.logprobs, there, strict=True):
            assert_alike(mine, theirs, row)


@given(
    choices=st.lists(a_choice(), min_size=1, max_size=5),
    vocabulary=st.sampled_from([5, 64, 300]),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_a_row_that_awaits_its_last_token_gets_what_it_gets_when_that_is_known(
    choices: list[dict[str, Any]], vocabulary: int, seed: int, data: st.DataObject
) -> None:
    """Beside a host that knows every token before it chooses the next."""
    prompt = [1, 2, 1, vocabulary - 1]
    plain, told = (
        [
            SamplerState(
                SamplingParams(max_tokens=9, **o), prompt, seed=seed, sample=i, end_ids=[1]
            )
            for i, o in enumerate(choices)
        ]
        for _ in range(2)
    )
    sampler = DeviceSampler(torch.device(DEVICE))
    begun: list[tuple[Choice, list[int]]] = []
    answers: list[list[int]] = [[] for _ in choices]

    def conclude() -> None:
        choice, who = begun.pop(0)
        found = all_of(choice)
        for place in found.mistaken.tolist():
            sampler.forget(told[who[place]])
        for i, token_id in zip(who, found.token_ids.tolist()):
            told[i].append(token_id)
            answers[i].append(token_id)
        if begun and len(found.mistaken):  # begun in vain: once more with what is said
            begun[0] = ask(begun[0][1], range(0), None), begun[0][1]

    def ask(who: list[int], running: Any, said: Any) -> Choice:
        turns = [Turn(told[i], running.index(i) if i in running else None) for i in who]
        step = [len(answers[i]) + (i in running) for i in who]
        rows = [some_logits(seed + 7 * n + i, 1, vocabulary, 3.0, 3) for i, n in zip(who, step)]
        return sampler.choose(on_device(np.concatenate(rows)), turns, said)

    for _ in range(7):
        who = data.draw(
            st.lists(st.sampled_from(range(len(choices))), min_size=1, unique=True), label="who"
        )
        if begun:
            last, running = begun[0]
            begun.append((ask(who, running, last.said), who))
            conclude()
        else:
            begun.append((ask(who, range(0), None), who))
        if data.draw(st.booleans(), label="read"):
            while begun:
                conclude()
    while begun:
        conclude()
    for i, state in enumerate(plain):
        for n, token_id in enumerate(answers[i]):
            logits = some_logits(seed + 7 * n + i, 1, vocabulary, 3.0, 3)
            assert sample(logits, [state]).token_ids.tolist() == [token_id]
            state.append(token_id)


class _Waiting(TorchDispatchMode):
    """Fails where the host looks at a number, and where something crosses unasked."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        found = operation(*arguments, **(options or {}))
        name = operation.__name__.split(".")[0]
        assert name not in ("_local_scalar_dense", "nonzero"), name
        if name in ("_to_copy", "copy_"):
            source = arguments[1 if name == "copy_" else 0]
            assert source.device == found.device, name
        for tensor in arguments:
            assert not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta", name
        return found


def test_choosing_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device without numbers, where nothing crosses but what is sent in one go."""

    def sent(arrays: list[NDArray[np.int64]], device: torch.device) -> list[torch.Tensor]:
        return [torch.empty(a.shape, dtype=torch.int64, device="meta") for a in arrays]

    for module in (device_sampling, device_counts, device_logprobs):
        monkeypatch.setattr(module, "uploaded", sent)
    options: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.7, "min_p": 0.1},
        {"temperature": 0.7, "top_p": 0.9, "logprobs": 3},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 1, "logprobs": 0},
        {"logit_bias": {3: 1.0}, "min_tokens": 3, "stop_token_ids": [4]},
    ]
    sampler = DeviceSampler(torch.device("meta"))
    states = [SamplerState(SamplingParams(**o), [1, 2], seed=1) for o in options]
    sampler.wide.add(states[3])
    logits = torch.empty(len(states), 20_000, dtype=torch.bfloat16, device="meta")
    with _Waiting():
        first = sampler.choose(logits, [Turn(state) for state in states], is_overwritten=True)
        turns = [Turn(state, i) for i, state in enumerate(states)]
        second = sampler.choose(logits, turns, first.said, is_overwritten=True)
    assert second.said.shape == (len(states),)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}])
def test_most_rows_of_a_peaked_distribution_never_cross(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 4, (400, 20_001)).astype(np.float32)).to(DEVICE)
    crossed: list[int] = []

    def counted(rows: Any, states: Any) -> Any:
        crossed.append(len(states))
        return sample(rows, states)

    monkeypatch.setattr(device_sampling, "sample", counted)
    params = SamplingParams(temperature=0.8, **options)
    turns = [Turn(SamplerState(params, seed=i)) for i in range(400)]
    all_of(DeviceSampler(torch.device(DEVICE)).choose(logits, turns))
    assert sum(crossed) < 0.05 * 400


def test_what_the_filters_keep_beyond_the_candidates_crosses_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.from_numpy(some_logits(1, 4, 20_001, 0.1, 0)).to(DEVICE)
    crossed: list[int] = []

    def counted(rows: Any, states: Any) -> Any:
        crossed.append(len(states))
        return sample(rows, states)

    monkeypatch.setattr(device_sampling, "sample", counted)
    states = [SamplerState(SamplingParams(top_p=0.9), seed=i) for i in range(4)]
    sampler = DeviceSampler(torch.device(DEVICE))
    for expected in ([4], [4]):
        all_of(sampler.choose(logits, [Turn(state) for state in states]))
        assert crossed == expected


@pytest.mark.parametrize("options", [{"temperature": 1}, {"top_p": 0.9999999}, {"top_k": 3}])
def test_a_number_near_the_end_of_a_tokens_share_is_not_certain(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.zeros(1, 4, device=DEVICE)  # each has a quarter
    if "top_k" in options:
        logits[0] = torch.tensor([0.0, 0.0, 0.0, -9.0])
    state = SamplerState(SamplingParams(**options), seed=1)
    end = 1 / 3 if "top_k" in options else 0.25
    near = MARGIN / 2 if "temperature" in options else FINE_MARGIN * end / 2
    for uniform, is_clear in ((end + near, False), (end - near, False), (end + 0.05, True)):
        real = device_sampling.draws_of
        monkeypatch.setattr(
            device_sampling,
            "draws_of",
            lambda *a, real=real, u=uniform: real(*a)._replace(uniform=np.array([u])),
        )
        choice = DeviceSampler(torch.device(DEVICE)).choose(logits, [Turn(state)])
        monkeypatch.setattr(device_sampling, "draws_of", real)
        assert (choice.read.numpy()[1][0] == 0) == is_clear


def test_where_top_p_ends_is_not_certain_by_a_sum_that_could_be_another() -> None:
    """Half of the mass, to the last digit, lies in the first token."""
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]], device=DEVICE))
    found = set()
    for seed in range(40):
        state = SamplerState(SamplingParams(top_p=0.5), seed=seed)
        choice = DeviceSampler(torch.device(DEVICE)).choose(logits, [Turn(state)])
        expected = sample(logits.cpu().numpy(), [state])
        assert all_of(choice).token_ids.tolist() == expected.token_ids.tolist()
        found.add(int(choice.read.numpy()[1][0]))
    assert found == {0, 1}


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_p": 0.5}, {"logprobs": 1}, {}])
def test_rows_without_a_largest_number_are_named(options: dict[str, Any]) -> None:
    logits = torch.zeros(3, 9, device=DEVICE)
    logits[1, 4] = torch.nan
    turns = [Turn(SamplerState(SamplingParams(**options), seed=i)) for i in range(3)]
    choice = DeviceSampler(torch.device(DEVICE)).choose(logits, turns)
    with pytest.raises(NotFinite) as failure:
        all_of(choice)
    assert failure.value.rows == [1]
    assert len(choice.conclude(np.array([0, 2])).token_ids) == 3


@given(st.integers(0, 2**32), st.integers(1, 9), st.sampled_from([5, 64, 513]))
def test_the_likeliest_is_the_first_of_several(seed: int, rows: int, vocabulary: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.integers(-3, 3, (rows, vocabulary)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.2] = -np.inf
    logits[:, rng.integers(vocabulary)] = 2
    states = [SamplerState(SamplingParams(temperature=0), seed=0) for _ in range(rows)]
    sampler, turns = DeviceSampler(torch.device(DEVICE)), [Turn(state) for state in states]
    found = all_of(sampler.choose(on_device(logits), turns))
    assert found.token_ids.tolist() == sample(logits, states).token_ids.tolist()
    logits[0, 0], logits[-1, -1] = np.nan, np.inf
    with pytest.raises(NotFinite) as failure:
        all_of(sampler.choose(on_device(logits), turns))
    assert failure.value.rows == sorted({0, rows - 1})
