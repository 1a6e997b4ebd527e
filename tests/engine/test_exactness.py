"""Greedy float32 output is that of `transformers.generate`, one prompt at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("transformers", reason="needs the extra [engine]")

import torch

from models.tiny_engine import TinyEngine, greedy, tokens_of
from models.tiny_models import VOCABULARY, generated, tiny_model
from pagedkv.engine.architectures import WORKING
from pagedkv.engine.beam_request import BeamRequest
from pagedkv.engine.beam_search import BeamSearchParams
from pagedkv.engine.model import PagedModel
from pagedkv.engine.outputs import Completion
from pagedkv.engine.request import Request
from pagedkv.engine.sampling_params import SamplingParams

CORE = {
    "deepseek_v3": 4,  # latent attention with expanded heads, experts
    "gemma2": 16,  # soft cap, windows
    "gemma3n_text": 1,  # layers that share another layer's keys and values
    "gpt2": 256,  # positions learned, not rotated
    "gpt_oss": 4,  # attention sinks
    "llama": 1,
    "llama4_text": 4,  # chunked attention
    "mimo_v2_flash": 16,  # layers that differ in heads and sizes
    "phimoe": 4,  # a window that only the mask knows
    "qwen2_moe": 1,  # the same, by kind of layer
    "qwen3": 16,
    "stablelm": 4,  # drops keyword arguments on the way to its layers
}
"""Architectures that every run tests, each for something that the others have not, with a block
size; the rest of `WORKING` comes with `make test-architectures`."""


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


LONG = prompt(1, 23)
PROMPTS = [prompt(0, 5), LONG, prompt(2, 11), LONG[:18] + prompt(3, 3), LONG]


def check_busy(model_type: str, block_size: int) -> None:
    """Prompts that share prefixes, chunks of a few tokens, and too little memory for all."""
    model = tiny_model(model_type)
    expected = [generated(model, p, 24) for p in PROMPTS]
    num_blocks = max(84 // block_size, 2)
    engine = TinyEngine(model, num_blocks, block_size, seats=4, budget=7)
    assert engine.answers(PROMPTS, greedy(24)) == expected
    statistics = engine.scheduler.statistics()
    if block_size <= 16:
        assert statistics.preemptions > 0 and statistics.hit_tokens > 0
    assert statistics.used_blocks == 0


@pytest.mark.parametrize(("model_type", "block_size"), CORE.items())
def test_an_architecture_says_what_transformers_says(model_type: str, block_size: int) -> None:
    check_busy(model_type, block_size)


@pytest.mark.exhaustive
@pytest.mark.parametrize("block_size", [1, 4, 16, 256])
@pytest.mark.parametrize("model_type", sorted(WORKING))
def test_every_architecture_says_what_transformers_says(model_type: str, block_size: int) -> None:
    check_busy(model_type, block_size)


@cache
def llama() -> tuple[PagedModel, list[list[int]]]:
    model = tiny_model("llama")
    expected = [generated(model, p, 24) for p in PROMPTS]
    return PagedModel(model), expected


@pytest.mark.parametrize("block_size", [1, 4, 16, 256])
@pytest.mark.parametrize("budget", [4, 7, 64])
def test_neither_block_size_nor_chunk_size_changes_a_token(block_size: int, budget: int) -> None:
    model, expected = llama()
    engine = TinyEngine(model, max(84 // block_size, 2), block_size, seats=4, budget=budget)
    assert engine.answers(PROMPTS, greedy(24)) == expected


@pytest.mark.parametrize("caching", [True, False])
def test_a_second_run_on_what_the_first_has_cached_says_the_same(caching: bool) -> None:
    model, expected = llama()
    engine = TinyEngine(model, 100, 4, prefix_caching=caching)
    for _ in range(2):
        assert engine.answers(PROMPTS, greedy(24)) == expected
    assert (engine.scheduler.statistics().hit_tokens > 80) == caching


def check_among_others(model_type: str, seed: int) -> None:
    """Samples, beams and cancellations around prompts whose answers are known, in little memory.

    What the samples say is their own affair; that it is as likely as the model takes it to be
    shows that each of them reads its own tokens and not those of another.
    """
    original = tiny_model(model_type)
    expected = [generated(original, p, 24) for p in PROMPTS]
    rng = random.Random(seed)
    block_size = rng.choice([1, 4, 16])
    engine = TinyEngine(
        tiny_model(model_type), 76 // block_size, block_size, seats=5, budget=rng.randint(5, 20)
    )
    kept: list[tuple[int, Request]] = []
    others: list[Request] = []
    searches: list[BeamRequest] = []
    for _ in range(24):
        for _ in range(rng.randint(0, 4)):
            engine.step()
        what = rng.random()
        if what < 0.4:
            place = rng.randrange(len(PROMPTS))
            kept.append((place, engine.add(PROMPTS[place], greedy(24))))
        elif what < 0.75:
            params = SamplingParams(
                n=rng.randint(1, 3), seed=seed, max_tokens=rng.randint(1, 20), logprobs=0
            )
            others.append(engine.add(rng.choice(PROMPTS), params))
        elif what < 0.8:
            params = BeamSearchParams(num_beams=2, max_tokens=rng.randint(1, 8))
            searches.append(engine.add_search(rng.choice(PROMPTS), params))
        elif others or searches:
            gone: list[Any] = rng.choice([found for found in (others, searches) if found])
            engine.cancel(gone[rng.randrange(len(gone))])
            engine.scheduler.verify()
    engine.finish_all()
    for place, request in kept:
        assert tokens_of(request) == expected[place]
    for request in others:
        for completion in request.generation().completions:
            check_likelihoods(original, request.prompt_ids, completion)
    statistics = engine.scheduler.statistics()
    assert statistics.preemptions > 0 and statistics.hit_tokens > 0
    assert statistics.used_blocks == 0


def check_likelihoods(model: Any, prompt_ids: Sequence[int], completion: Completion) -> None:
    """The log probabilities of an answer are those that `model` gives it, computed in one go."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt_ids, *completion.token_ids]])).logits[0].float()
    theirs = logits.log_softmax(-1)[len(prompt_ids) - 1 : -1]
    ids = torch.tensor(completion.token_ids, dtype=torch.int64)
    ours = [found.logprob for found in completion.logprobs or ()]
    assert ours == pytest.approx(theirs.gather(1, ids[:, None])[:, 0].tolist(), abs=2e-3)


@pytest.mark.parametrize(
    ("model_type", "seed"),
    [
        *(("llama", seed) for seed in range(4)),
        ("deepseek_v3", 0),
        ("gemma2", 1),
        ("gpt_oss", 2),
        ("llama4_text", 0),
        ("mimo_v2_flash", 1),
        ("qwen2_moe", 2),
    ],
)
def test_whatever_comes_goes_and_forks_around_it_changes_no_token(
    model_type: str, seed: int
) -> None:
    check_among_others(model_type, seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model_type", sorted(WORKING))
def test_whatever_happens_around_it_changes_no_token_of_any_architecture(
    model_type: str, seed: int
) -> None:
    check_among_others(model_type, seed)


def test_weights_as_they_came_say_the_same_as_packed_ones() -> None:
    _, expected = llama()
    engine = TinyEngine(PagedModel(tiny_model("llama"), pack_weights=False), 40)
    assert engine.answers(PROMPTS, greedy(24)) == expected
