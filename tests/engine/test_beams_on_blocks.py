"""Beam search by forking: the sequences of `transformers`, in blocks that beams share."""

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
from pagedkv.engine.beam_request import BeamRequest
from pagedkv.engine.beam_search import BeamSearchParams
from pagedkv.engine.model import PagedModel
from pagedkv.engine.sampling import NotFinite
from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.errors import InvalidInput, NeverFits

OFTEN = frozenset(range(0, VOCABULARY, 5))  # beams end all the time


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


@cache
def _models(model_type: str = "llama") -> tuple[Any, PagedModel]:
    """A model as it is, and the same one on paged memory."""
    return tiny_model(model_type), PagedModel(tiny_model(model_type))


Found = list[tuple[list[int], float]]


def theirs(
    ids: list[int], params: BeamSearchParams, eos: frozenset[int], model_type: str = "llama"
) -> Found:
    """What `transformers` finds: tokens and score of each sequence, best first."""
    output = _models(model_type)[0].generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        num_beams=params.num_beams,
        num_return_sequences=params.num_return_sequences,
        max_new_tokens=params.max_tokens,
        do_sample=False,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=sorted(eos) or None,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found: Found = []
    scores = [1.0] if params.num_beams == 1 else output.sequences_scores.tolist()
    for tokens, score in zip(output.sequences[:, len(ids) :].tolist(), scores):
        end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
        if score > -1e8:  # it fills up with sequences that never ended
            found.append((tokens[:end], score))
    return found


def ours(request: BeamRequest) -> Found:
    return [(list(beam.token_ids), beam.score) for beam in request.generation().beams]


def assert_same(found: Found, expected: Found) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, score), (_, wanted) in zip(found, expected):
        assert wanted == 1.0 or score == pytest.approx(wanted, rel=1e-3)


def wide(num_beams: int, max_tokens: int = 12, **options: Any) -> BeamSearchParams:
    return BeamSearchParams(
        num_beams=num_beams, num_return_sequences=num_beams, max_tokens=max_tokens, **options
    )


SEARCHES = [
    (wide(1), frozenset[int]()),
    (wide(2), frozenset[int]()),
    (wide(5), frozenset[int]()),
    (wide(4), OFTEN),
    (wide(4, length_penalty=0.0), OFTEN),
    (wide(3, length_penalty=2.0), OFTEN),
    (wide(3, length_penalty=-1.0), OFTEN),
    (wide(4, early_stopping=True), OFTEN),
    (wide(4, early_stopping="never"), OFTEN),
    (wide(4, early_stopping="never", length_penalty=0.5), frozenset([7, 30])),
    (wide(4, 1), OFTEN),
]


@pytest.mark.parametrize(("params", "eos"), SEARCHES)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_beams_are_those_of_transformers(
    params: BeamSearchParams, eos: frozenset[int], block_size: int
) -> None:
    engine = TinyEngine(_models()[1], 400 // block_size, block_size, end_token_ids=eos)
    request = engine.add_search(prompt(1, 11), params)
    engine.finish_all()
    assert_same(ours(request), theirs(prompt(1, 11), params, eos))
    assert engine.scheduler.statistics().used_blocks == 0


@pytest.mark.parametrize("model_type", ["gpt_oss", "gemma2", "deepseek_v3", "qwen2_moe"])
def test_beams_of_other_architectures_are_too(model_type: str) -> None:
    engine = TinyEngine(_models(model_type)[1], 100, end_token_ids=OFTEN, budget=9)
    request = engine.add_search(prompt(2, 20), wide(3))
    engine.finish_all()
    assert_same(ours(request), theirs(prompt(2, 20), wide(3), OFTEN, model_type))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [8, 12, 17, 30])
@pytest.mark.parametrize("seats", [4, 8])
def test_beams_that_do_not_fit_beside_each_other_are_computed_one_after_the_other(
    num_blocks: int, seats: int, caching: bool
) -> None:
    engine = TinyEngine(
        _models()[1], num_blocks, seats=seats, end_token_ids=OFTEN, prefix_caching=caching
    )
    searches = [engine.add_search(prompt(i, 13), wide(4, 14)) for i in range(2)]
    other = engine.add(prompt(5, 9), greedy(16))
    engine.finish_all()
    for i, request in enumerate(searches):
        assert_same(ours(request), theirs(prompt(i, 13), wide(4, 14), OFTEN))
    assert tokens_of(other) == generated(_models()[0], prompt(5, 9), 16)
    statistics = engine.scheduler.statistics()
    assert statistics.used_blocks == 0
    if num_blocks == 8:
        assert sum(request.num_preemptions for request in searches) > 0


@pytest.mark.parametrize("seed", range(8))
def test_whatever_comes_and_goes_around_a_search_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    block_size = rng.choice([1, 4, 16])
    engine = TinyEngine(
        _models()[1],
        rng.randint(60, 200) // block_size,
        block_size,
        seats=rng.choice([4, 6]),
        budget=rng.randint(6, 20),
        end_token_ids=OFTEN,
    )
    kept: list[tuple[list[int], BeamSearchParams, BeamRequest]] = []
    others: list[Any] = []
    for _ in range(24):
        for _ in range(rng.randint(0, 5)):
            engine.step()
        ids = prompt(rng.randrange(3), rng.choice([5, 17, 17, 23]))
        what = rng.random()
        if what < 0.3:
            params = wide(rng.randint(1, 4), rng.choice([3, 12]))
            kept.append((ids, params, engine.add_search(ids, params)))
        elif what < 0.5:
            others.append(engine.add_search(ids, wide(rng.randint(1, 4))))
        elif what < 0.7:
            others.append(engine.add(ids, SamplingParams(n=rng.randint(1, 3), max_tokens=9)))
        elif others:
            engine.cancel(others.pop(rng.randrange(len(others))))
            engine.scheduler.verify()
    engine.finish_all()
    for ids, params, request in kept:
        assert_same(ours(request), theirs(ids, params, OFTEN))
    assert engine.scheduler.statistics().used_blocks == 0


def test_beams_hold_the_blocks_that_sharing_by_hand_would_hold() -> None:
    """A prompt of 10 tokens in blocks of 4: two full blocks, and two tokens of a third."""
    engine = TinyEngine(_models()[1], 60)
    request = engine.add_search(prompt(1, 10), wide(4, 30))
    engine.step()  # the prompt: 4 beams share all of its 3 blocks
    assert len(request.sequences) == 4
    statistics = engine.scheduler.statistics()
    assert (statistics.used_blocks, statistics.table_entries) == (3, 12)
    engine.step()  # token 11 of each: those that are all one sequence's children share one block
    for _ in range(20):
        tokens = [engine.scheduler.token_ids(s).tolist() for s in request.sequences]
        # All but the newest token are computed. Beams share the blocks of what they have in
        # common; of a block that is not full only if they are children of one parent.
        prefixes = {tuple(t[:stop]) for t in tokens for stop in range(4, len(t), 4)}
        prefixes |= {tuple(t[:-1]) for t in tokens}
        statistics = engine.scheduler.statistics()
        assert statistics.used_blocks == len(prefixes)
        assert statistics.table_entries == 4 * -(-(len(tokens[0]) - 1) // 4)
        engine.step()
    engine.finish_all()
    assert engine.scheduler.statistics().used_blocks == 0


def test_a_second_search_finds_the_prompt_and_the_beams_of_the_first() -> None:
    engine = TinyEngine(_models()[1], 200)
    first = engine.add_search(prompt(1, 20), wide(3, 9))
    engine.finish_all()
    best = list(first.generation().beams[0].token_ids)
    again = engine.add_search(prompt(1, 20), wide(3, 9))
    longer = engine.add_search([*prompt(1, 20), *best], wide(2, 5))
    engine.finish_all()
    assert again.num_cached_tokens == 16 and longer.num_cached_tokens == 28
    assert_same(ours(again), ours(first))
    assert_same(ours(longer), theirs([*prompt(1, 20), *best], wide(2, 5), frozenset()))


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6, 9])
@pytest.mark.parametrize("num_blocks", [9, 40])
def test_a_cancelled_search_gives_every_block_back(steps: int, num_blocks: int) -> None:
    engine = TinyEngine(_models()[1], num_blocks, budget=8, seats=6)
    doomed = engine.add_search(prompt(1, 18), wide(4, 12))
    other = engine.add(prompt(2, 6), greedy(12))
    for _ in range(steps):
        engine.step()
    engine.cancel(doomed)
    engine.cancel(doomed)
    engine.scheduler.verify()
    engine.finish_all()
    assert doomed.is_finished and doomed.generation().beams == ()
    assert tokens_of(other) == generated(_models()[0], prompt(2, 6), 12)
    assert engine.scheduler.statistics().used_blocks == 0


@pytest.mark.parametrize("num_blocks", [9, 60])
@pytest.mark.parametrize("steps", [0, 2, 5])
def test_a_failing_step_ends_the_searches_that_it_computed_and_leaves_the_others(
    steps: int, num_blocks: int
) -> None:
    engine = TinyEngine(_models()[1], num_blocks, budget=64, seats=4)
    failing = engine.add_search(prompt(1, 14), wide(4, 12))
    waiting = engine.add_search(prompt(2, 9), wide(3, 6))
    for _ in range(steps):
        engine.step()
    real = engine.model.logits
    engine.model.logits = lambda *a: real(*a) * np.nan  # type: ignore[method-assign]
    try:
        with pytest.raises(NotFinite):
            for _ in range(3):  # a step may be empty, while somebody gives way
                engine.step()
    finally:
        del engine.model.logits
    engine.scheduler.verify()
    assert failing.is_finished and failing.generation().beams == ()
    assert not waiting.is_finished
    engine.finish_all()
    assert_same(ours(waiting), theirs(prompt(2, 9), wide(3, 6), frozenset()))
    assert engine.scheduler.statistics().used_blocks == 0


def test_a_search_that_could_never_fit_is_refused_and_one_that_fits_by_a_beam_is_not() -> None:
    engine = TinyEngine(_models()[1], 6, seats=4)
    with pytest.raises(NeverFits, match="request big needs 8 blocks, the whole memory has 6"):
        engine.add_search(prompt(2, 20), wide(2, 10), name="big")
    request = engine.add_search(prompt(2, 14), wide(4, 11))  # 6 blocks a beam
    engine.finish_all()
    assert_same(ours(request), theirs(prompt(2, 14), wide(4, 11), frozenset()))


@pytest.mark.parametrize(
    ("ids", "params", "message"),
    [
        ([], wide(2), "no tokens"),
        ([VOCABULARY], wide(2), f"0 to {VOCABULARY - 1}"),
        ([3] * MAX_LENGTH, wide(2), "leaves no room"),
        ([3, 4], wide(9), "asks for 9 beams, which run at once, but max_num_seqs is 8"),
    ],
)
def test_bad_searches_are_refused_in_one_line(
    ids: list[int], params: BeamSearchParams, message: str
) -> None:
    engine = TinyEngine(_models()[1], 300)
    with pytest.raises(InvalidInput, match=message) as refused:
        engine.add_search(ids, params)
    assert "\n" not in str(refused.value)
    assert engine.is_idle


def test_a_search_ends_where_the_model_does() -> None:
    engine = TinyEngine(_models()[1], 300, max_model_len=30)
    request = engine.add_search(prompt(1, 25), wide(2, 100))
    engine.finish_all()
    assert [len(beam.token_ids) for beam in request.generation().beams] == [5, 5]
    assert_same(ours(request), theirs(prompt(1, 25), wide(2, 5), frozenset()))
