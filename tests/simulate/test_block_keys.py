"""Prefix ids of any granularity become block keys that hit exactly where the ids say so."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.made_trace import made_trace
from pagedkv.memory import KVCacheManager
from pagedkv.simulate.block_keys import sequence_keys
from pagedkv.simulate.trace import Trace
from pagedkv.simulate.trace_formats import read_trace

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"


def trace_of(
    requests: list[tuple[int, int, list[int]]], granularity: int, *, covers_output: bool = False
) -> Trace:
    """Requests of (prompt tokens, output tokens, prefix ids)."""
    ids = [i for _, _, own in requests for i in own]
    return Trace(
        name="made",
        format="made",
        arrival_s=np.arange(len(requests), dtype=np.float64),
        prompt_tokens=np.array([prompt for prompt, _, _ in requests], dtype=np.int64),
        output_tokens=np.array([output for _, output, _ in requests], dtype=np.int64),
        session=np.full(len(requests), -1, dtype=np.int64),
        prefix_ids=np.array(ids, dtype=np.int64),
        prefix_offsets=np.cumsum([0, *(len(own) for _, _, own in requests)]).astype(np.int64),
        granularity=granularity,
        covers_output=covers_output,
    )


def keys_of(trace: Trace, block_size: int, num_samples: int = 1) -> list[list[tuple[int, int]]]:
    first, number, keys = sequence_keys(trace, block_size=block_size, num_samples=num_samples)
    assert first.dtype == number.dtype == np.int64 and keys.dtype == np.uint64
    assert keys.shape == (number.sum(), 2)
    return [
        [(int(a), int(b)) for a, b in keys[first[s] : first[s] + number[s]]]
        for s in range(len(trace) * num_samples)
    ]


def shared(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> int:
    """Leading keys that two sequences have in common; none may be equal behind them."""
    n = next((i for i in range(min(len(a), len(b))) if a[i] != b[i]), min(len(a), len(b)))
    assert not set(a[n:]) & set(b), "equal keys behind a difference, or at another place"
    return n


def test_a_coarse_id_is_split_into_a_key_for_each_of_its_blocks() -> None:
    trace = trace_of([(1024, 1, [0, 1]), (1024, 1, [0, 2])], granularity=512)
    one, two = keys_of(trace, block_size=16)
    assert len(one) == len(two) == 64
    assert len(set(one)) == 64
    assert shared(one, two) == 32


@pytest.mark.parametrize(("block_size", "hits"), [(48, 2), (32, 3), (16, 7), (24, 4), (64, 1)])
def test_fine_ids_are_combined_and_any_different_one_makes_another_key(
    block_size: int, hits: int
) -> None:
    trace = trace_of(
        [(192, 1, list(range(12))), (192, 1, [*range(7), 50, *range(8, 12)])], granularity=16
    )
    one, two = keys_of(trace, block_size=block_size)
    assert len(one) == 192 // block_size
    assert shared(one, two) == hits == 7 * 16 // block_size


def test_a_block_that_touches_two_ids_needs_both() -> None:
    trace = trace_of([(48, 1, [0, 1, 2]), (48, 1, [0, 1, 3]), (48, 1, [0, 4, 2])], granularity=16)
    one, two, three = keys_of(trace, block_size=24)
    assert shared(one, two) == 1
    assert shared(one, three) == 0


def test_the_last_id_covers_only_the_tokens_that_are_there() -> None:
    trace = trace_of([(600, 20, [0, 1]), (600, 20, [0, 1])], granularity=512)
    one, two = keys_of(trace, block_size=16)
    assert len(one) == 619 // 16
    assert shared(one, two) == 600 // 16


def test_answers_are_nobody_elses_even_where_the_prompts_are_equal() -> None:
    trace = trace_of([(32, 33, [0, 1]), (32, 33, [0, 1])], granularity=16)
    one, two = keys_of(trace, block_size=16)
    assert len(one) == len(two) == 4
    assert shared(one, two) == 2


def test_ids_that_cover_the_output_let_the_next_turn_hit_the_answer() -> None:
    first, second = (32, 33, [0, 1, 2, 3, 4]), (65, 2, [0, 1, 2, 3, 4])
    one, two = keys_of(trace_of([first, second], 16, covers_output=True), block_size=16)
    assert shared(one, two) == 4
    one, two = keys_of(trace_of([(32, 33, [0, 1]), second], 16), block_size=16)
    assert shared(one, two) == 2


@pytest.mark.parametrize("covers_output", [False, True])
def test_samples_share_the_prompts_keys_and_no_key_of_their_answers(covers_output: bool) -> None:
    ids = [0, 1, 2, 3, 4] if covers_output else [0, 1, 2]
    trace = trace_of([(40, 40, ids), (40, 40, ids)], 16, covers_output=covers_output)
    sequences = keys_of(trace, block_size=8, num_samples=3)
    for a in range(6):
        for b in range(a):
            recorded = covers_output and a == 3 and b == 0
            assert shared(sequences[a], sequences[b]) == (9 if recorded else 5)


def test_the_last_output_token_has_no_place_in_any_block() -> None:
    (keys,) = keys_of(trace_of([(16, 17, [0])], granularity=16), block_size=16)
    assert len(keys) == 2
    (keys,) = keys_of(trace_of([(16, 16, [0])], granularity=16), block_size=16)
    assert len(keys) == 1


def test_a_trace_without_ids_gives_no_keys() -> None:
    assert keys_of(trace_of([(40, 4, []), (40, 4, [])], 0), block_size=4) == [[], []]


def test_the_same_trace_gives_the_same_keys_each_time() -> None:
    trace = trace_of([(40, 4, [0, 1, 2])], 16)
    assert keys_of(trace, block_size=8) == keys_of(trace, block_size=8)


@st.composite
def traces(draw: st.DrawFn) -> tuple[Trace, int]:
    granularity = draw(st.sampled_from([1, 2, 3, 4, 8, 12]))
    block_size = draw(st.sampled_from([1, 2, 3, 4, 6, 16]))
    covers_output = draw(st.booleans())
    requests = []
    for _ in range(draw(st.integers(1, 5))):
        prompt, output = draw(st.integers(1, 40)), draw(st.integers(1, 20))
        count = math.ceil((prompt + output * covers_output) / granularity)
        # The n-th id is drawn from few, none of which stands at another place.
        ids = [2 * n + draw(st.sampled_from([0, 0, 0, 0, 1])) for n in range(count)]
        requests.append((prompt, output, ids))
    return trace_of(requests, granularity, covers_output=covers_output), block_size


@given(traces())
def test_two_requests_share_a_block_exactly_if_all_ids_up_to_its_end_are_equal(
    case: tuple[Trace, int],
) -> None:
    trace, block_size = case
    sequences = keys_of(trace, block_size)
    for a in range(len(trace)):
        for b in range(a):
            assert shared(sequences[a], sequences[b]) == _equal_blocks(trace, a, b, block_size)


def _equal_blocks(trace: Trace, a: int, b: int, block_size: int) -> int:
    """Token by token: full blocks that both requests know, every id of which is the same."""
    blocks = 0
    known = min(_known_tokens(trace, a), _known_tokens(trace, b))
    while (blocks + 1) * block_size <= known:
        tokens = range(blocks * block_size, (blocks + 1) * block_size)
        if any(_id_of(trace, a, t) != _id_of(trace, b, t) for t in tokens):
            break
        blocks += 1
    return blocks


def _known_tokens(trace: Trace, request: int) -> int:
    """Tokens whose ids are known and whose keys and values are kept."""
    if trace.covers_output:
        return int(trace.prompt_tokens[request] + trace.output_tokens[request]) - 1
    return int(trace.prompt_tokens[request])


def _id_of(trace: Trace, request: int, token: int) -> int:
    return int(trace.prefix_ids[trace.prefix_offsets[request] + token // trace.granularity])


@functools.cache
def keyed_trace(
    name: str,
) -> tuple[Trace, NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]]:
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"needs the trace {name}, which is not part of this repository")
    trace = read_trace(str(path))
    return trace, *sequence_keys(trace, block_size=16, num_samples=1)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "num_requests", "num_blocks", "hit_tokens"),
    [
        ("mooncake_conversation.jsonl", 3_000, 19_999, 1_574_624),
        ("mooncake_conversation.jsonl", 3_000, 49_999, 1_832_064),
        ("mooncake_conversation.jsonl", 3_000, 199_999, 5_953_520),
        ("mooncake_conversation.jsonl", 3_000, 999_999, 12_546_016),
        ("mooncake_synthetic.jsonl", 1_500, 99_999, 765_760),
    ],
)
def test_prompts_of_real_traces_hit_to_the_token_what_vllms_manager_hits(
    name: str, num_requests: int, num_blocks: int, hit_tokens: int
) -> None:
    trace, first, number, keys = keyed_trace(name)
    kv = KVCacheManager(num_blocks, 16)
    for r in range(num_requests):
        prompt = int(trace.prompt_tokens[r])
        of_prompt = keys[first[r] : first[r] + min(number[r], prompt // 16)]
        sequence = kv.add_keyed_sequence(prompt, of_prompt)
        kv.commit([sequence])
        kv.free(sequence)
    assert kv.statistics().hit_tokens == hit_tokens


def test_ids_of_any_size_are_told_apart() -> None:
    """A key takes two ids a word: [1 + 2**33, 0] must not read as [1, 2]."""
    requests = [(0.0, 8, 1)] * 4
    ids = [[1, 2], [1 + 2**33, 0], [-1, 2**62], [1 + 2**33, 0]]
    trace = made_trace(requests, ids=ids, granularity=4)
    _, num_keys, keys = sequence_keys(trace, block_size=8, num_samples=1)
    assert num_keys.tolist() == [1] * 4
    one, two, three, again = (tuple(key) for key in keys.tolist())
    assert len({one, two, three}) == 3 and again == two


def test_ids_that_are_small_keep_their_keys_whatever_else_is_in_the_trace() -> None:
    few = made_trace([(0.0, 8, 1)], ids=[[5, 2**32 - 1]], granularity=4)
    more = made_trace([(0.0, 8, 1)] * 2, ids=[[5, 2**32 - 1], [0, 3]], granularity=4)
    keys = [sequence_keys(t, block_size=8, num_samples=1)[2][0].tolist() for t in (few, more)]
    assert keys[0] == keys[1]
