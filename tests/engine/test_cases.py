"""Situations that must come out right, each with its own test."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("transformers", reason="needs the extra [engine]")

import torch

from models.tiny_engine import TinyEngine, greedy, tokens_of
from models.tiny_models import MAX_LENGTH, VOCABULARY, generated, tiny_model
from pagedkv.engine import core
from pagedkv.engine.model import PagedModel
from pagedkv.engine.sampling import NotFinite
from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.errors import InvalidInput, NeverFits


@cache
def _models() -> tuple[Any, PagedModel]:
    """A model as it is, and the same one on paged memory."""
    return tiny_model("llama"), PagedModel(tiny_model("llama"))


def says(prompt: list[int], count: int) -> list[int]:
    return generated(_models()[0], prompt, count)


def engine(num_blocks: int = 40, block_size: int = 4, **options: Any) -> TinyEngine:
    return TinyEngine(_models()[1], num_blocks, block_size, **options)


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


@pytest.mark.parametrize("length", range(9, 15))
def test_a_sequence_preempted_around_a_block_boundary_resumes_on_its_cached_blocks(
    length: int,
) -> None:
    running = engine(10, budget=64, seats=2)
    old, young = prompt(1, 12), prompt(2, length)
    requests = [running.add(p, greedy(16)) for p in (old, young)]
    running.finish_all()
    statistics = running.scheduler.statistics()
    assert statistics.preemptions > 0
    assert [tokens_of(r) for r in requests] == [says(p, 16) for p in (old, young)]


def test_a_preempted_sequence_finds_its_own_blocks_again_and_keeps_its_sampled_token() -> None:
    running = engine(8, budget=64, seats=2)
    first = running.add(prompt(1, 8), greedy(16))  # takes two of the blocks that it gives up
    second = running.add(prompt(2, 8), greedy(20))
    running.finish_all()
    statistics = running.scheduler.statistics()
    assert statistics.preemptions == 1
    assert statistics.recomputed_tokens == 8  # of the 16 that it lost
    assert second.num_cached_tokens == 0  # when it first came
    told = running.statistics()
    assert (told.readmitted_tokens, told.readmitted_hit_tokens) == (17, 8)
    assert tokens_of(first) == says(prompt(1, 8), 16)
    assert tokens_of(second) == says(prompt(2, 8), 20)


def test_two_identical_prompts_in_one_step_neither_cached_yet() -> None:
    running = engine(budget=64)
    ids = prompt(1, 21)
    requests = [running.add(ids, greedy(12)) for _ in range(2)]
    running.step()
    assert [r.num_cached_tokens for r in requests] == [0, 0]
    running.finish_all()
    assert [tokens_of(r) for r in requests] == [says(ids, 12)] * 2


def alone(ids: list[int], sample: int, count: int, seed: int) -> list[int]:
    """One of several samples, from an engine in which nothing forks that matters."""
    running = engine(100, budget=64)
    request = running.add(ids, SamplingParams(n=sample + 1, seed=seed, max_tokens=count))
    running.finish_all()
    return tokens_of(request, sample)


def test_samples_that_write_different_tokens_into_a_shared_block_are_all_right() -> None:
    ids = prompt(1, 6)  # one and a half blocks
    running = engine(40)
    request = running.add(ids, SamplingParams(n=3, seed=5, max_tokens=10, logprobs=0))
    running.step()
    copies = 0
    while not running.is_idle:
        before = running.scheduler.statistics()
        running.step()
        copies += before.shared_blocks == 2
    samples = [tokens_of(request, i) for i in range(3)]
    assert len({tuple(s) for s in samples}) == 3 and copies == 1
    # What each sample said is as likely as the model says it is after its own tokens.
    model = _models()[0]
    for completion in request.generation().completions:
        with torch.no_grad():
            logits = model(torch.tensor([ids + list(completion.token_ids)])).logits[0]
        expected = logits.log_softmax(-1)[len(ids) - 1 : -1]
        for row, token, found in zip(
            expected, completion.token_ids, completion.logprobs, strict=True
        ):
            assert found.logprob == pytest.approx(float(row[token]), abs=1e-3)


def test_samples_that_fork_when_memory_is_full_wait_for_it_and_say_the_same() -> None:
    ids = prompt(3, 14)
    running = engine(6, budget=64)
    request = running.add(ids, SamplingParams(n=4, seed=9, max_tokens=9))
    running.finish_all()
    assert running.scheduler.statistics().preemptions > 0
    for sample in range(4):
        assert tokens_of(request, sample) == alone(ids, sample, 9, seed=9)


def test_cancel_after_the_step_that_finished_it_changes_nothing() -> None:
    running = engine()
    request = running.add(prompt(1, 6), greedy(3))
    other = running.add(prompt(2, 6), greedy(6))
    while not request.is_finished:
        running.step()
    running.cancel(request)
    running.cancel(request)
    running.finish_all()
    assert request.generation().completions[0].finish_reason == "length"
    assert tokens_of(other) == says(prompt(2, 6), 6)
    assert running.scheduler.statistics().used_blocks == 0


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 9])
def test_cancel_in_the_middle_of_a_prefill_or_an_answer_gives_every_block_back(
    steps: int,
) -> None:
    running = engine(budget=8, seats=4)
    doomed = running.add(prompt(1, 40), SamplingParams(n=2, max_tokens=30, seed=1))
    other = running.add(prompt(2, 6), greedy(12))
    for _ in range(steps):
        running.step()
    running.cancel(doomed)
    running.scheduler.verify()
    running.finish_all()
    assert {c.finish_reason for c in doomed.generation().completions} == {"abort"}
    assert tokens_of(other) == says(prompt(2, 6), 12)
    assert running.scheduler.statistics().used_blocks == 0


def test_what_could_never_fit_is_refused_when_it_arrives_and_the_others_go_on() -> None:
    running = engine(6)
    other = running.add(prompt(1, 10), greedy(8))
    with pytest.raises(NeverFits, match="request big needs 8 blocks, the whole memory has 6"):
        running.add(prompt(2, 20), greedy(10), name="big")
    running.finish_all()
    assert tokens_of(other) == says(prompt(1, 10), 8)


def test_two_that_fit_only_one_after_the_other_both_finish() -> None:
    running = engine(6, budget=64)
    both = [running.add(prompt(i, 16), greedy(9)) for i in range(2)]
    running.finish_all()
    assert [tokens_of(r) for r in both] == [says(prompt(i, 16), 9) for i in range(2)]


def test_a_prompt_of_no_tokens_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no tokens"):
        engine().add([], greedy(1))


def test_a_prompt_of_the_models_full_length_leaves_no_room_and_one_less_leaves_one_token() -> None:
    running = engine(140, budget=64)
    with pytest.raises(InvalidInput, match=f"leaves no room.*maximum is {MAX_LENGTH}"):
        running.add(prompt(1, MAX_LENGTH), greedy(1))
    ids = prompt(1, MAX_LENGTH - 1)
    request = running.add(ids, greedy(5))
    running.finish_all()
    assert tokens_of(request) == says(ids, 1)
    assert request.generation().completions[0].finish_reason == "length"


def test_without_a_limit_an_answer_ends_where_the_memory_does() -> None:
    running = engine(5)
    request = running.add(prompt(1, 9), SamplingParams(temperature=0, max_tokens=None))
    running.finish_all()
    assert tokens_of(request) == says(prompt(1, 9), 5 * 4 + 1 - 9)


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    for bad in (-1, VOCABULARY):
        with pytest.raises(InvalidInput, match=f"0 to {VOCABULARY - 1}"):
            engine().add([5, bad], greedy(1))


@pytest.mark.parametrize(("budget", "at_once"), [(5, 256), (64, 256), (64, 4)])
def test_log_probabilities_of_a_prompt_are_right_although_it_is_cached(
    budget: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "_REPORTED_ROWS", at_once)
    ids = prompt(1, 22)
    running = engine(9, budget=budget, seats=2)
    running.add(ids, greedy(1))
    running.finish_all()  # now it is cached
    request = running.add(ids, greedy(8, prompt_logprobs=2))
    running.add(prompt(2, 6), greedy(12))
    running.finish_all()
    found = request.generation().prompt_logprobs
    assert found is not None and len(found) == len(ids) and found[0] is None
    with torch.no_grad():
        expected = _models()[0](torch.tensor([ids])).logits[0].log_softmax(-1)
    for row, token, entry in zip(expected, ids[1:], found[1:], strict=False):
        assert entry is not None and entry.token_id == token and len(entry.top) == 2
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert entry.top[0][0] == int(row.argmax())
    assert tokens_of(request) == says(ids, 8)


def test_log_probabilities_of_a_prompt_are_told_once_although_part_of_it_is_computed_twice() -> (
    None
):
    running = engine(8, budget=3, seats=2)
    old, ids = prompt(2, 4), prompt(1, 20)
    running.add(old, greedy(20))
    request = running.add(ids, greedy(2, prompt_logprobs=0))
    running.finish_all()
    assert request.num_preemptions == 1
    found = request.generation().prompt_logprobs
    with torch.no_grad():
        expected = _models()[0](torch.tensor([ids])).logits[0].log_softmax(-1)
    assert found is not None and len(found) == len(ids)
    for row, token, entry in zip(expected, ids[1:], found[1:], strict=False):
        assert entry is not None and entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-3)


def test_penalties_look_at_what_was_said_so_far_also_after_a_preemption() -> None:
    running = engine(9, budget=64, seats=2)
    prompts = [prompt(1, 8), prompt(2, 8)]
    found = running.answers(prompts, greedy(20, repetition_penalty=1.8))
    assert running.scheduler.statistics().preemptions > 0
    for ids, said in zip(prompts, found):
        theirs = _models()[0].generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=20,
            do_sample=False,
            repetition_penalty=1.8,
        )
        assert said == theirs[0, len(ids) :].tolist() != says(ids, 20)


def test_a_step_that_fails_cancels_its_own_requests_and_leaves_the_others() -> None:
    running = engine(40, seats=1, budget=64)
    failing, waiting = running.add(prompt(1, 9), greedy(5)), running.add(prompt(2, 9), greedy(5))
    model = running.model
    real = model.logits

    def broken(*arguments: Any) -> Any:
        return real(*arguments) * np.nan

    model.logits = broken  # type: ignore[method-assign]
    try:
        with pytest.raises(NotFinite):
            running.step()
    finally:
        del model.logits
    running.scheduler.verify()
    assert failing.is_finished and not waiting.is_finished
    again = running.add(prompt(1, 9), greedy(5))
    running.finish_all()
    assert again.num_cached_tokens == 0  # nothing of the failed step was published
    assert tokens_of(waiting) == says(prompt(2, 9), 5)
    assert tokens_of(again) == says(prompt(1, 9), 5)


def test_requests_without_a_seed_differ_and_the_engines_seed_repeats_them() -> None:
    def run(seed: int) -> list[list[int]]:
        running = engine(40, seed=seed)
        return running.answers([prompt(1, 5)] * 2, SamplingParams(max_tokens=8))

    first = run(0)
    assert first[0] != first[1]
    assert run(0) == first != run(1)


def test_what_the_host_prepares_does_not_count_as_the_forward() -> None:
    now_s = 0.0

    def later(seconds: float, work: Any) -> Any:
        def done(*arguments: Any) -> Any:
            nonlocal now_s
            now_s += seconds
            return work(*arguments)

        return done

    model = PagedModel(tiny_model("llama"))
    running = TinyEngine(model, 40, clock=lambda: now_s)
    running.storage.plan = later(2.0, running.storage.plan)  # type: ignore[method-assign]
    model.forward = later(4.0, model.forward)  # type: ignore[method-assign]
    running.add(prompt(1, 5), greedy(3))
    running.step()
    assert running.last_step is not None
    assert (running.last_step.forward_s, running.last_step.total_s) == (4.0, 6.0)
