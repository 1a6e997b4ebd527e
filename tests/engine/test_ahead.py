"""The engine says the same whether steps are scheduled ahead or not."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("transformers", reason="needs the extra [engine]")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.tiny_engine import TinyEngine, greedy, tokens_of
from models.tiny_models import VOCABULARY, tiny_model
from pagedkv.engine import core
from pagedkv.engine.beam_search import BeamSearchParams
from pagedkv.engine.device import OutOfDeviceMemory, Read
from pagedkv.engine.device_sampling import Choice, DeviceSampler
from pagedkv.engine.llm import LLM
from pagedkv.engine.model import PagedModel
from pagedkv.engine.recording import Recorder
from pagedkv.engine.request import Request
from pagedkv.engine.sampling import NotFinite
from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.errors import InvalidInput
from pagedkv.scheduling.continuous import Batch


@cache
def model() -> PagedModel:
    return PagedModel(tiny_model("llama"))


def engine(num_blocks: int = 40, block_size: int = 4, **options: Any) -> TinyEngine:
    return TinyEngine(model(), num_blocks, block_size, **{"ahead": True, **options})


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


def of_every_kind(seed: int, num: int, end: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests that stop anywhere, draw, fork, count tokens and want to know how likely."""
    rng = random.Random(seed)
    shared = prompt(seed, 18)
    made = []
    for i in range(num):
        ids = shared[: rng.randint(1, 18)] + prompt(seed + i, rng.randint(1, 12))
        options: dict[str, Any] = {"temperature": 0, "max_tokens": rng.randint(1, 14)}
        if rng.random() < 0.4:
            options |= {"temperature": 0.9, "seed": i}
            options |= rng.choice([{}, {"top_p": 0.9}, {"top_k": 9, "top_p": 0.8}, {"min_p": 0.1}])
            if rng.random() < 0.5:
                options |= {"n": rng.randint(2, 3)}
        if rng.random() < 0.2:
            options |= rng.choice(
                [
                    {"repetition_penalty": 1.4},
                    {"frequency_penalty": 1.0, "presence_penalty": -0.5},
                    {"logit_bias": {end: 2.0, 5: -3.0}, "repetition_penalty": 0.9},
                ]
            )
        if rng.random() < 0.2:
            options |= {"logprobs": 2}
        if rng.random() < 0.1:
            options |= {"prompt_logprobs": 1}
        if rng.random() < 0.2:
            options |= {"min_tokens": rng.randint(1, options["max_tokens"])}
        if rng.random() < 0.3:
            options |= {"stop_token_ids": [end, *rng.choices(range(VOCABULARY), k=40)]}
        made.append((ids, SamplingParams(**options)))
    return made


def run(
    asked: list[tuple[list[int], SamplingParams]], seed: int, *, ahead: bool, **options: Any
) -> tuple[list[Request], set[int], TinyEngine]:
    """All requests, coming one by one between steps; some are cancelled."""
    rng = random.Random(seed)
    made = engine(ahead=ahead, end_token_ids=frozenset([7]), **options)
    requests, cancelled = [], set()
    for i, (ids, params) in enumerate(asked):
        requests.append(made.add(ids, params))
        for _ in range(rng.randint(0, 3)):
            made.step()
        if rng.random() < 0.2:
            victim = rng.randrange(i + 1)
            cancelled.add(victim)
            made.cancel(requests[victim])
            made.scheduler.verify()
    made.finish_all()
    assert made.scheduler.statistics().used_blocks == 0
    return requests, cancelled, made


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(12, 60),
    seats=st.integers(3, 8),
    budget=st.integers(8, 40),
    caching=st.booleans(),
)
def test_requests_of_every_kind_get_the_same_ahead_or_not(
    seed: int, num_blocks: int, seats: int, budget: int, caching: bool
) -> None:
    asked = of_every_kind(seed, 8, end=7)
    options = {
        "num_blocks": num_blocks,
        "seats": seats,
        "budget": budget,
        "prefix_caching": caching,
    }
    assert_same(run(asked, seed, ahead=False, **options), run(asked, seed, ahead=True, **options))


def assert_same(
    plain: tuple[list[Request], set[int], TinyEngine],
    found: tuple[list[Request], set[int], TinyEngine],
) -> None:
    """Two runs of the same requests brought the same; whoever was cancelled, as far as it came."""
    left = plain[1] | found[1]
    for i, (one, other) in enumerate(zip(plain[0], found[0], strict=True)):
        for mine, theirs in zip(
            one.generation().completions, other.generation().completions, strict=True
        ):
            n = min(len(mine.token_ids), len(theirs.token_ids))
            assert mine.token_ids[:n] == theirs.token_ids[:n]
            assert (mine.logprobs is None) == (theirs.logprobs is None)
            for a, b in zip((mine.logprobs or ())[:n], (theirs.logprobs or ())[:n], strict=True):
                assert (a.token_id, a.rank) == (b.token_id, b.rank)
                assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
                assert [t for t, _ in a.top] == [t for t, _ in b.top]
            if i not in left:
                assert len(mine.token_ids) == len(theirs.token_ids)
                assert mine.finish_reason == theirs.finish_reason
        if one.prompt_logprobs is not None and i not in left:
            assert other.prompt_logprobs is not None
            assert len(one.prompt_logprobs) == len(other.prompt_logprobs)


class _Mistaken(DeviceSampler):
    """Takes many rows for what they do not say, and knows that it is not certain."""

    share = 0.3
    num_mistakes = 0

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._rng = random.Random(1)

    def choose(self, logits: Any, turns: Any, *more: Any, **options: Any) -> Choice:
        choice = super().choose(logits, turns, *more, **options)
        said, known = torch.from_numpy(choice.read.numpy()).clone()
        for i in range(len(turns)):
            if known[i] == 0 and self._rng.random() < self.share:
                said[i] = self._rng.randrange(VOCABULARY)
                known[i] = 1
                type(self).num_mistakes += 1
        kept = logits.clone() if options.get("is_overwritten") else logits
        read = Read(torch.stack([said, known]))
        return replace(choice, said=said, logits=kept, read=read)


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(12, 60),
    seats=st.integers(3, 8),
    budget=st.integers(8, 40),
    share=st.sampled_from([0.05, 0.3, 1.0]),
)
def test_a_token_that_was_taken_for_another_changes_nothing(
    seed: int, num_blocks: int, seats: int, budget: int, share: float
) -> None:
    asked = of_every_kind(seed, 8, end=7)
    options = {"num_blocks": num_blocks, "seats": seats, "budget": budget}
    plain = run(asked, seed, ahead=False, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "DeviceSampler", _Mistaken)
        patch.setattr(_Mistaken, "share", share)
        patch.setattr(_Mistaken, "num_mistakes", 0)
        found = run(asked, seed, ahead=True, **options)
        assert _Mistaken.num_mistakes > 0
    assert_same(plain, found)


class _MistakenOnce(DeviceSampler):
    """Takes the first token of an answer with seed 77 for another one."""

    def choose(self, logits: Any, turns: Any, *more: Any, **options: Any) -> Choice:
        choice = super().choose(logits, turns, *more, **options)
        said, known = torch.from_numpy(choice.read.numpy()).clone()
        for i, turn in enumerate(turns):
            if turn is not None and turn.state.seed == 77 and turn.position == 0:
                said[i], known[i] = (said[i] + 1) % VOCABULARY, 1
        return replace(choice, said=said, logits=logits, read=Read(torch.stack([said, known])))


def test_who_ends_with_a_token_that_was_taken_for_another_leaves_no_wrong_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = [5, 6, 7]  # the next token fills the first block
    plain = engine(ahead=False)
    [[first, *_]] = plain.answers([ids], greedy(1))
    asked, following = [*ids, first, 30, 31], greedy(4)
    monkeypatch.setattr(core, "DeviceSampler", _MistakenOnce)
    running = engine()
    ends = SamplingParams(temperature=0, seed=77, max_tokens=9, stop_token_ids=[first])
    request = running.add(ids, ends)
    running.step()  # and the one that was begun with another token, which nobody wants any more
    assert request.is_finished and running.is_idle
    hit = running.add(asked, following)
    running.finish_all()
    assert hit.num_cached_tokens == 4
    assert tokens_of(hit) == engine(ahead=False).answers([asked], following)[0]


def test_greedy_steps_are_begun_before_the_one_before_is_read() -> None:
    running = engine()
    running.add(prompt(1, 6), greedy(6))
    running.step()
    assert running.scheduler.num_steps == 2
    running.finish_all()
    assert running.scheduler.num_steps == 6  # none for a token that is known not to be wanted


def test_one_that_stops_costs_one_row_too_many_and_says_nothing_more() -> None:
    alone = engine(ahead=False)
    said = alone.answers([prompt(1, 6)], greedy(9))[0]
    running = engine()
    told: list[Any] = []
    request = running.add(
        prompt(1, 6),
        SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[said[3]]),
        listener=told.append,
    )
    running.finish_all()
    assert tokens_of(request) == said[: said.index(said[3]) + 1]
    assert sum(len(chunk.token_ids) for chunk in told) == len(tokens_of(request))
    assert running.scheduler.statistics().used_blocks == 0


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1, "seed": 1},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"temperature": 0, "repetition_penalty": 1.3},
        {"frequency_penalty": 0.5, "presence_penalty": 0.5},
        {"temperature": 0, "logprobs": 1},
        {"temperature": 0, "logit_bias": {5: 1.0}},
        {"temperature": 0, "min_tokens": 5},
        {"n": 2, "prompt_logprobs": 1},
    ],
)
def test_what_is_drawn_or_counted_does_not_wait_for_its_token(options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True, **options)
    said = []
    for ahead in (False, True):
        running = engine(ahead=ahead, end_token_ids=frozenset([3]))
        request = running.add(prompt(1, 6), params)
        running.step()
        assert running.scheduler.num_steps == 1 + ahead
        running.finish_all()
        assert running.scheduler.num_steps == 5
        said.append([c.token_ids for c in request.generation().completions])
    assert said[0] == said[1]


def test_a_search_waits_for_its_beams() -> None:
    running = engine()
    running.add_search(prompt(1, 6), BeamSearchParams(num_beams=2, max_tokens=5))
    running.step()
    assert running.scheduler.num_steps == 1


def test_a_search_is_the_same_beside_requests_that_are_scheduled_ahead() -> None:
    found = []
    for ahead in (False, True):
        running = engine(ahead=ahead)
        search = running.add_search(prompt(1, 9), BeamSearchParams(num_beams=3, max_tokens=8))
        others = [running.add(prompt(i, 7), greedy(12)) for i in range(3)]
        running.finish_all()
        found.append(
            ([b.token_ids for b in search.generation().beams], [tokens_of(r) for r in others])
        )
    assert found[0] == found[1]


def test_a_cancelled_request_is_gone_with_the_step_that_computes_it() -> None:
    running = engine()
    request = running.add(prompt(1, 9), greedy(9))
    running.step()
    running.cancel(request)
    assert running.is_idle and running.scheduler.statistics().used_blocks == 0


def test_a_step_that_fails_while_the_next_runs_ends_its_own_and_no_others() -> None:
    said = engine(ahead=False).answers([prompt(2, 9)], greedy(9))[0]
    running = engine(budget=9)
    fails = running.add(prompt(1, 9), greedy(9))
    real, calls = running.model.logits, []

    def spoiled(storage: Any, batch: Any, rows: Any, *more: Any) -> Any:
        calls.append(batch)
        logits = real(storage, batch, rows, *more)
        return logits * np.nan if len(calls) == 1 else logits

    running.model.logits = spoiled  # type: ignore[method-assign]
    try:
        waits = running.add(prompt(2, 9), greedy(9))
        with pytest.raises(NotFinite):
            running.step()
        assert len(calls) == 2 and len(calls[1].sequences) == 2
        running.scheduler.verify()
        running.spoil()
        assert fails.is_finished and not waits.is_finished
        running.finish_all()
    finally:
        del running.model.logits
    assert tokens_of(waits) == said


def test_a_step_that_cannot_be_begun_fails_after_the_one_before_has_told_its_tokens() -> None:
    running = engine()
    request = running.add(prompt(1, 9), greedy(9))
    real, calls = running.model.logits, []

    def broken(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("no")
        return real(*arguments)

    running.model.logits = broken  # type: ignore[method-assign]
    try:
        with pytest.raises(ValueError, match="no"):
            running.step()
    finally:
        del running.model.logits
    assert len(tokens_of(request)) == 1 and request.is_finished
    assert running.is_idle
    running.scheduler.verify()
    assert running.answers([prompt(1, 9)], greedy(3)) == engine(ahead=False).answers(
        [prompt(1, 9)], greedy(3)
    )


def test_a_recorded_run_is_not_scheduled_ahead(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run.jsonl", block_size=4, settings={})
    with pytest.raises(InvalidInput, match="record without ahead"):
        engine(recorder=recorder)
    recorder.close()


class Scarce:
    """A model on a device that has no memory left for the calls whose numbers are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: set[int]) -> None:
        self.calls = 0
        self._real = model().logits
        self._fails = fails
        monkeypatch.setattr(model(), "logits", self)

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        logits = self._real(*arguments)  # it has written what it could
        if self.calls in self._fails:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return logits


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("fails", [{1}, {2}, {3}, {2, 4}])
def test_a_step_that_found_no_memory_is_computed_again(
    fails: set[int], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = engine(ahead=False).answers([prompt(i, 9) for i in range(3)], greedy(6))
    scarce = Scarce(monkeypatch, fails)
    running = engine(ahead=ahead, budget=13)
    assert running.answers([prompt(i, 9) for i in range(3)], greedy(6)) == expected
    assert scarce.calls > 4


def test_a_step_that_is_computed_again_copies_no_block_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sample copies a block whose other user gives way, and a third writes to that block then."""

    def said() -> Any:
        running = engine(4, ahead=False)
        batches: list[Batch] = []
        schedule = running.scheduler.schedule

        def scheduled() -> Batch:
            batches.append(schedule())
            return batches[-1]

        running.scheduler.schedule = scheduled  # type: ignore[method-assign]
        forked = SamplingParams(n=2, seed=1, max_tokens=4, ignore_eos=True)
        samples = running.add([5, 6, 7, 8, 9], forked)
        other = running.add([20, 21, 22, 23], greedy(4))
        running.finish_all()
        [[copied, _]] = batches[1].copies.tolist()
        assert copied in batches[1].slots // 4  # or this tests nothing
        told = [completion.token_ids for completion in samples.generation().completions]
        return told, tokens_of(other)

    expected = said()
    Scarce(monkeypatch, {2})
    assert said() == expected


@pytest.mark.parametrize("options", [{}, {"prompt_logprobs": 0}])
def test_a_step_that_never_ran_publishes_nothing(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = engine()
    runs = running.add([5, 6, 7], greedy(9))
    running.step()
    unwanted = running.add(prompt(1, 9), greedy(9, **options))
    Scarce(monkeypatch, {1})
    running.step()
    assert [step.is_postponed for step in running._begun] == [True]
    running.cancel(runs)
    running.cancel(unwanted)
    assert running.is_idle
    request = running.add(prompt(1, 9), greedy(4))
    running.finish_all()
    assert request.num_cached_tokens == 0
    assert tokens_of(request) == engine(ahead=False).answers([prompt(1, 9)], greedy(4))[0]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_finds_no_memory_twice_ends_its_own_and_the_engine_goes_on(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = engine(ahead=ahead, seats=1, budget=9)
    fails, waits = running.add(prompt(1, 9), greedy(6)), running.add(prompt(2, 9), greedy(6))
    Scarce(monkeypatch, {1, 2})
    with pytest.raises(OutOfDeviceMemory, match="cpu has no memory left for a step of 9 tokens"):
        running.step()
    running.scheduler.verify()
    assert fails.is_finished and not waits.is_finished
    running.finish_all()
    assert tokens_of(waits) == engine(ahead=False).answers([prompt(2, 9)], greedy(6))[0]


def test_memory_that_runs_out_while_a_token_is_chosen_ends_the_step_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    running = engine(ahead=False)
    request = running.add(prompt(1, 9), greedy(6))
    with monkeypatch.context() as patch:
        patch.setattr(core, "on_host", full)
        with pytest.raises(OutOfDeviceMemory):
            running.step()
    assert request.is_finished and running.is_idle
    assert len(running.answers([prompt(1, 9)], greedy(6))[0]) == 6


def test_memory_that_is_there_again_when_a_token_is_chosen_once_more_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, calls = core.on_host, []

    def full(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor)
        if len(calls) == 2:  # five prompt tokens are noted by then
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return real(tensor)

    monkeypatch.setattr(core, "_REPORTED_ROWS", 5)
    said = []
    for is_scarce in (False, True):
        running = engine(ahead=False)
        request = running.add(prompt(1, 9), greedy(4, prompt_logprobs=0))
        if is_scarce:
            monkeypatch.setattr(core, "on_host", full)
        running.finish_all()
        said.append((tokens_of(request), request.prompt_logprobs))
    assert len(calls) > 2 and max(len(tensor) for tensor in calls) <= 5
    assert said[0] == said[1] and len(said[1][1] or ()) == 9


def test_who_generates_and_who_streams_get_the_same_from_an_llm_that_schedules_ahead(
    tmp_path: Path,
) -> None:
    with pytest.raises(InvalidInput, match="record without ahead"):
        LLM(tiny_model("llama"), ahead=True, record=tmp_path / "run.jsonl")
    assert not list(tmp_path.iterdir())
    prompts = [prompt(i, 9) for i in range(3)]
    expected = engine(ahead=False).answers(prompts, greedy(9))

    async def streamed(llm: LLM) -> tuple[list[int], list[int]]:
        whole: list[int] = []
        async for chunk in llm.stream(prompts[0], greedy(9)):
            whole += chunk.token_ids
        part: list[int] = []
        async for chunk in llm.stream(prompts[1], greedy(9)):
            part += chunk.token_ids
            if len(part) == 4:
                break
        return whole, part

    with LLM(model()._model, ahead=True, num_blocks=40, block_size=4) as llm:
        assert [list(a.token_ids) for a in llm.generate(prompts, greedy(9))] == expected
        assert asyncio.run(streamed(llm)) == (expected[0], expected[1][:4])
        assert [list(a.token_ids) for a in llm.generate(prompts, greedy(9))] == expected
        llm.verify()
        assert llm.statistics().memory.used_blocks == 0
