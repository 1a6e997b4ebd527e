"""Beam search beside that of `transformers`, and beside looking at all sequences."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest

from pagedkv.engine.beam_search import BeamSearch, BeamSearchParams, BeamSequence
from pagedkv.engine.logprobs import log_probabilities
from pagedkv.errors import InvalidInput

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@functools.cache
def tiny_model() -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def search_with(model: Any, params: BeamSearchParams, eos: tuple[int, ...]) -> list[BeamSequence]:
    """Drive the search by running every beam from its beginning at each step."""
    import torch

    search = BeamSearch(params, eos_token_ids=eos)
    beams = [PROMPT]
    while True:
        with torch.no_grad():
            logits = model(torch.tensor(beams)).logits[:, -1]
        step = search.advance(log_probabilities(logits.numpy()))
        if step is None:
            return search.best()
        beams = [
            [*beams[parent], token_id]
            for parent, token_id in zip(step.parents.tolist(), step.token_ids.tolist())
        ]


OFTEN = tuple(range(0, 40, 4))  # sequences end all the time


@pytest.mark.parametrize(
    "num_beams, eos, length_penalty, early_stopping",
    [
        *itertools.product([3], [OFTEN], [1.0, 0.0, 2.0, -1.0], [False, True, "never"]),
        *itertools.product([4], [(7, 11, 30)], [1.0, 0.5], [False, "never"]),
        (2, (7,), 1.0, True),
        (5, (), 1.0, False),
    ],
)
def test_the_sequences_are_those_of_transformers(
    num_beams: int, eos: tuple[int, ...], length_penalty: float, early_stopping: Any
) -> None:
    model = tiny_model()
    import torch

    theirs = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        num_beams=num_beams,
        num_return_sequences=num_beams,
        max_new_tokens=9,
        do_sample=False,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        eos_token_id=list(eos) or None,
        pad_token_id=39,
        return_dict_in_generate=True,
        output_scores=True,
    )
    params = BeamSearchParams(
        num_beams=num_beams,
        num_return_sequences=num_beams,
        max_tokens=9,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    ours = search_with(model, params, eos)
    for place, found in enumerate(ours):
        expected = theirs.sequences[place, len(PROMPT) :].tolist()
        assert list(found.token_ids) == expected[: len(found.token_ids)]
        assert set(expected[len(found.token_ids) :]) <= {39}
        assert found.score == pytest.approx(theirs.sequences_scores[place].item(), rel=1e-4)
        assert found.finished == (found.token_ids[-1] in eos)
    # transformers fills up with sequences that never ended; here there are none of those.
    assert len(ours) == sum(score > -1e8 for score in theirs.sequences_scores.tolist())


def test_wide_enough_it_finds_the_likeliest_of_all_sequences() -> None:
    """Four tokens, three steps: 64 beams look at everything."""
    table = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    logprobs = table - np.log(np.exp(table).sum(-1, keepdims=True))
    search = BeamSearch(BeamSearchParams(num_beams=64, num_return_sequences=5, max_tokens=3))
    last = [4]
    while (step := search.advance(logprobs[last])) is not None:
        last = step.token_ids.tolist()
    everything = sorted(
        itertools.product(range(4), repeat=3),
        key=lambda tokens: -sum(logprobs[a, b] for a, b in zip((4, *tokens), tokens)),
    )
    assert [found.token_ids for found in search.best()] == everything[:5]
    for found in search.best():
        wanted = sum(logprobs[a, b] for a, b in zip((4, *found.token_ids), found.token_ids))
        assert found.logprob == pytest.approx(float(wanted), rel=1e-5)


def test_parents_and_tokens_are_those_of_the_likeliest_continuations() -> None:
    params = BeamSearchParams(num_beams=2, max_tokens=5, early_stopping="never")
    search = BeamSearch(params, eos_token_ids=[0])
    step = search.advance(np.log(np.array([[0.5, 0.3, 0.2]], dtype=np.float32)))
    assert step is not None  # token 0 ended at once; the two others go on
    assert (step.parents.tolist(), step.token_ids.tolist()) == ([0, 0], [1, 2])
    step = search.advance(np.log(np.array([[0.1, 0.45, 0.45], [0.8, 0.1, 0.1]], dtype=np.float32)))
    assert step is not None  # both go on from the first: the second is forked away
    assert (step.parents.tolist(), step.token_ids.tolist()) == ([0, 0], [1, 2])
    assert [found.token_ids for found in search.best(2)] == [(0,), (2, 0)]


def log_of(*rows: list[float]) -> np.ndarray:
    return np.log(np.array(rows, dtype=np.float32))


def test_beams_go_on_although_every_likely_token_ends_them() -> None:
    params = BeamSearchParams(num_beams=2, max_tokens=5, early_stopping="never")
    search = BeamSearch(params, eos_token_ids=[0, 1, 2, 3])
    step = search.advance(log_of([0.3, 0.25, 0.2, 0.15, 0.06, 0.04]))
    assert step is not None
    assert step.token_ids.tolist() == [4, 5]


def test_length_that_is_no_gain_is_not_hoped_for() -> None:
    """With a penalty below 0 a beam is worth most now, however long it may still grow."""
    params = BeamSearchParams(
        num_beams=2, max_tokens=10, length_penalty=-1.0, early_stopping="never"
    )
    search = BeamSearch(params, eos_token_ids=[0])
    assert search.advance(log_of([0.3, 0.5, 0.15, 0.05])) is not None
    # Two are kept now; the worse one scores 2 log(0.5 * 0.45), below the best beam's 2 log(0.25).
    assert search.advance(log_of([0.45, 0.04, 0.01, 0.5], [0.25] * 4)) is not None
    assert not search.done


def test_a_beam_that_could_only_equal_what_is_kept_is_not_followed() -> None:
    search = BeamSearch(BeamSearchParams(num_beams=1, max_tokens=5), eos_token_ids=[0])
    assert search.advance(log_of([0.4, 0.4, 0.2])) is None
    assert search.best()[0].token_ids == (0,)


def test_of_two_that_are_as_good_the_one_found_first_is_better() -> None:
    search = BeamSearch(
        BeamSearchParams(num_beams=2, max_tokens=5, length_penalty=0.0), eos_token_ids=[0]
    )
    search.advance(log_of([0.25, 0.5, 0.2, 0.05]))
    search.advance(log_of([0.5, 0.3, 0.1, 0.1], [0.25] * 4))
    first, second = search.best(2)
    assert first.score == second.score
    assert (first.token_ids, second.token_ids) == ((0,), (1, 0))


def test_the_end_token_is_like_any_other_where_it_is_ignored() -> None:
    params = BeamSearchParams(num_beams=1, max_tokens=3, ignore_eos=True)
    search = BeamSearch(params, eos_token_ids=[0])
    row = np.log(np.array([[0.9, 0.1]], dtype=np.float32))
    while search.advance(row) is not None:
        pass
    (found,) = search.best()
    assert found.token_ids == (0, 0, 0)
    assert not found.finished


def test_a_vocabulary_smaller_than_the_search_is_wide_makes_fewer_beams() -> None:
    search = BeamSearch(BeamSearchParams(num_beams=8, max_tokens=3))
    row = np.log(np.array([0.6, 0.4], dtype=np.float32))
    widths = []
    rows = row[None]
    while (step := search.advance(rows)) is not None:
        widths.append(len(step.parents))
        rows = np.tile(row, (len(step.parents), 1))
    assert widths == [2, 4]
    assert len(search.best(8)) == 8


@pytest.mark.parametrize(
    "options, said",
    [
        ({"num_beams": 0}, "num_beams is 0: give a whole number, at least 1"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5: give a whole number, at least 1"),
        ({"length_penalty": float("inf")}, "length_penalty is inf: give a finite number"),
        (
            {"early_stopping": "always"},
            "early_stopping is 'always': give True, False or 'never'",
        ),
        (
            {"num_beams": 2, "num_return_sequences": 3},
            "num_return_sequences is 3 and num_beams 2: only num_beams sequences are kept, "
            "give at most as many",
        ),
    ],
)
def test_bad_options_are_refused_in_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        BeamSearchParams(**options)
    assert str(refused.value) == said


def test_steps_of_the_wrong_shape_or_after_the_end_are_refused() -> None:
    search = BeamSearch(BeamSearchParams(num_beams=2, max_tokens=1))
    rows = np.zeros((2, 5), dtype=np.float32)
    with pytest.raises(InvalidInput, match="log probabilities of 2 beams: there are 1"):
        search.advance(rows)
    assert search.advance(rows[:1]) is None
    with pytest.raises(InvalidInput, match="over: begin a new one"):
        search.advance(rows[:1])
