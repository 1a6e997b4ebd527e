"""Mistakes that engines have shipped, each as a test. Blocks hold 4 tokens unless said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from models.memory_state import assert_unchanged, free_list, snapshot
from models.token_storage import TokenStorage
from pagedkv import KVCacheManager, NeverFits, OutOfBlocks
from pagedkv.errors import BrokenLaw, UnknownSequence
from pagedkv.memory import block_key, block_pool, prefix_cache

SECRET = bytes(range(16))


def manager(num_blocks: int, block_size: int = 4) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size, secret=SECRET)


def cache(kv: KVCacheManager, tokens: list[int], **named: Any) -> int:
    """Have `tokens` computed and given back; returns how many of them were cached."""
    sequence = kv.add_sequence(tokens, **named)
    num_cached = kv.num_cached_tokens(sequence)
    kv.commit([sequence])
    kv.free(sequence)
    return num_cached


def test_a_token_that_fits_into_the_last_block_needs_no_free_block() -> None:
    kv = manager(1)
    a = kv.add_sequence([1, 2, 3])
    assert kv.num_available_blocks == 0
    step = kv.extend([a], [4])
    assert step.slots.tolist() == [3]
    assert kv.block_table(a).tolist() == [0]


def test_a_token_behind_a_full_block_is_refused_without_a_free_block_and_changes_nothing() -> None:
    kv = manager(2)
    a, _ = kv.add_sequence([1, 2, 3, 4]), kv.add_sequence([1])
    before = snapshot(kv)
    with pytest.raises(OutOfBlocks) as refused:
        kv.extend([a], [5])
    assert (refused.value.needed, refused.value.available) == (1, 0)
    assert_unchanged(kv, before)


def test_five_tokens_after_three_take_exactly_one_block() -> None:
    kv = manager(8)
    a = kv.add_sequence([1, 2, 3])
    kv.extend([a], [[4, 5, 6, 7, 8]])
    assert len(kv.block_table(a)) == 2
    assert kv.num_available_blocks == 6


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "in_last_block"),
    [(15, 1, 15), (16, 1, 16), (17, 2, 1), (32, 2, 16)],
)
def test_a_sequence_has_exactly_the_blocks_that_its_length_needs(
    num_tokens: int, num_blocks: int, in_last_block: int
) -> None:
    kv = manager(8, block_size=16)
    a = kv.add_sequence(range(num_tokens))
    table = kv.block_table(a)
    assert len(table) == num_blocks
    in_last = kv.slots(a) // 16 == table[-1]
    assert in_last.sum() == in_last_block
    kv.verify()


def test_of_a_cached_prompt_of_12_tokens_8_hit_and_the_last_block_is_computed() -> None:
    kv = manager(8)
    tokens = list(range(12))
    cache(kv, tokens)
    taken = kv.num_available_blocks
    a = kv.add_sequence(tokens)
    assert kv.num_cached_tokens(a) == 8
    assert taken - kv.num_available_blocks == 3  # two hits come back into use, one block is new
    assert kv.statistics().cached_blocks == 1  # the third waits for a longer prompt


def test_a_prompt_of_9_tokens_run_three_times_finds_0_8_8_cached_tokens() -> None:
    kv = manager(8)
    assert [cache(kv, list(range(9))) for _ in range(3)] == [0, 8, 8]


def test_a_free_block_that_is_hit_is_not_available_to_the_same_call_again() -> None:
    kv = manager(6)
    kv.add_sequence([0])
    cache(kv, list(range(8)))
    cache(kv, [99] * 4)
    assert kv.num_available_blocks == 5
    before, order = snapshot(kv), free_list(kv)
    with pytest.raises(OutOfBlocks) as refused:
        kv.add_sequence(range(24))
    assert (refused.value.needed, refused.value.available) == (4, 3)
    assert_unchanged(kv, before)
    assert free_list(kv) == order
    a = kv.add_sequence(range(20))
    assert kv.num_cached_tokens(a) == 8


def test_hits_that_others_use_cost_nothing() -> None:
    kv = manager(18)
    a = kv.add_sequence(range(32))
    kv.commit([a])
    assert kv.num_available_blocks == 10
    b = kv.add_sequence(range(48))
    assert kv.num_cached_tokens(b) == 32
    assert kv.num_available_blocks == 6
    assert kv.block_table(b)[:8].tolist() == kv.block_table(a).tolist()


def test_a_block_handed_out_again_leaves_no_trace_of_its_old_key() -> None:
    kv = manager(1, block_size=2)
    cache(kv, [1, 2])
    key = block_key.block_key(kv._secret, *kv._root, np.array([1, 2], dtype=np.int64), 0, 2)
    assert prefix_cache.find(kv._memory.pool, *key) == 0
    a = kv.add_sequence([3, 4])
    assert prefix_cache.find(kv._memory.pool, *key) == -1
    assert not kv._memory.pool.key_index.any()
    kv.verify()
    kv.commit([a])
    kv.free(a)
    assert prefix_cache.find(kv._memory.pool, *key) == -1
    assert cache(kv, [1, 2]) == 0


def test_a_chain_loses_its_tail_first() -> None:
    kv = manager(4)
    other = kv.add_sequence([99])
    chain = list(range(12))
    a = kv.add_sequence(chain)
    third = kv.block_table(a)[2]
    kv.commit([a])
    kv.free(a)
    assert kv.statistics().cached_blocks == 3
    b = kv.add_sequence([98])
    assert kv.block_table(b).tolist() == [third]
    kv.free(b)
    kv.free(other)
    again = kv.add_sequence([*chain, 12])
    assert kv.num_cached_tokens(again) == 8


def test_the_least_recently_released_chain_is_lost_first() -> None:
    kv = manager(4)
    first, second = list(range(8)), list(range(10, 18))
    a, b = kv.add_sequence(first), kv.add_sequence(second)
    tables = kv.block_table(a).tolist(), kv.block_table(b).tolist()
    kv.commit([a, b])
    kv.free(b)
    kv.free(a)
    assert free_list(kv) == [*tables[1][::-1], *tables[0][::-1]]
    # A hit is a use: these blocks go last from now on, and the one taken beside them is useless.
    c = kv.add_sequence([*second, 0])
    kv.free(c)
    assert free_list(kv) == [tables[0][1], tables[0][0], *tables[1][::-1]]


def test_a_prompt_is_not_found_before_it_is_committed() -> None:
    kv = manager(8)
    tokens = list(range(9))
    a, b = kv.add_sequence(tokens), kv.add_sequence(tokens)
    assert kv.num_cached_tokens(b) == 0
    assert not set(kv.block_table(a)) & set(kv.block_table(b))
    kv.commit([a])
    c = kv.add_sequence([*tokens, 9])
    assert kv.num_cached_tokens(c) == 8
    assert kv.block_table(c)[:2].tolist() == kv.block_table(a)[:2].tolist()
    kv.commit([b])  # the same content twice: the index keeps the first
    kv.verify()


def test_parent_and_child_of_a_fork_each_see_their_own_next_token() -> None:
    kv = manager(8)
    storage = TokenStorage(8, 4)
    shared = [1, 2, 3, 4, 5, 6]
    parent = kv.add_sequence(shared)
    storage.write(kv.slots(parent), storage.content("", shared, 0, 6))
    child = kv.fork(parent)
    assert kv.num_available_blocks == 6

    step = kv.extend([parent, child], [7, 8])
    assert len(step.copies) == 1
    assert kv.statistics().used_blocks == 3
    storage.copy_pages(step.copies)
    for i, tokens in enumerate([[*shared, 7], [*shared, 8]]):
        storage.write(step.slots[i : i + 1], storage.content("", tokens, 6, 7))
    for sequence, tokens in ((parent, [*shared, 7]), (child, [*shared, 8])):
        assert np.array_equal(storage.read(kv.slots(sequence)), storage.content("", tokens, 0, 7))


def test_alternate_free_blocks_serve_one_sequence() -> None:
    kv = manager(8)
    sequences = [kv.add_sequence([i] * 4) for i in range(8)]
    for sequence in sequences[::2]:
        kv.free(sequence)
    e = kv.add_sequence(range(16))
    assert sorted(kv.block_table(e)) == [0, 2, 4, 6]
    kv.verify()


@pytest.mark.parametrize(
    "call",
    [
        lambda kv, s: kv.free(s),
        lambda kv, s: kv.fork(s),
        lambda kv, s: kv.extend([s], [1]),
        lambda kv, s: kv.extend([s], [[1, 2]]),
        lambda kv, s: kv.commit([s]),
        lambda kv, s: kv.slots(s),
        lambda kv, s: kv.address(s, 0),
        lambda kv, s: kv.block_table(s),
        lambda kv, s: kv.num_tokens(s),
        lambda kv, s: kv.num_cached_tokens(s),
    ],
    ids=[
        "free",
        "fork",
        "extend",
        "ragged",
        "commit",
        "slots",
        "address",
        "table",
        "tokens",
        "hits",
    ],
)
@pytest.mark.parametrize("which", ["freed", "never added"])
def test_a_sequence_that_is_not_there_is_named_and_nothing_changes(
    call: Callable[[KVCacheManager, int], Any], which: str
) -> None:
    kv = manager(4)
    a = kv.add_sequence([1, 2])
    kv.free(a)
    b = kv.add_sequence([1, 2])  # in the row, and in the blocks, that the freed one had
    unknown = a if which == "freed" else b + 7
    before = snapshot(kv)
    with pytest.raises(UnknownSequence, match=f"unknown sequence {unknown}") as error:
        call(kv, unknown)
    assert error.value.sequence == unknown
    assert_unchanged(kv, before)


def test_a_block_is_never_released_below_zero() -> None:
    kv = manager(4)
    a = kv.add_sequence([1, 2])
    before = snapshot(kv)
    with pytest.raises(BrokenLaw, match="law 2"):
        block_pool.release(kv._memory.pool, 3)
    assert_unchanged(kv, before)
    kv._memory.pool.ref_count[0] = 0  # as if somebody had released it behind the manager's back
    with pytest.raises(BrokenLaw, match="law 2: wrong count: block 0"):
        kv.free(a)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"salt": "a"}, {"salt": "b"}),
        ({"salt": "a"}, {"adapter": "a"}),
        ({"salt": "a"}, None),
        ({"salt": "a"}, {"salt": b"a"}),
        ({"salt": "1"}, {"salt": 1}),
        ({"salt": 1}, {"salt": -1}),
        ({"salt": 0}, {"salt": 256**8}),
        ({"salt": "a", "adapter": "b"}, {"salt": "b", "adapter": "a"}),
        ({"salt": "ab", "x": ""}, {"salt": "a", "x": "b"}),
        ({"salt": "a\0"}, {"salt": "a"}),
        ({"a": "", "b": ""}, {"a": ""}),
        ({"": "a"}, {"a": ""}),
    ],
)
def test_the_same_tokens_under_two_namespaces_share_nothing(one: Any, other: Any) -> None:
    kv = manager(16)
    tokens = list(range(12))
    assert cache(kv, tokens, namespace=one) == 0
    assert cache(kv, tokens, namespace=other) == 0
    assert cache(kv, tokens, namespace=one) == 8
    assert cache(kv, tokens, namespace=other) == 8


def test_a_prompt_larger_than_the_memory_is_refused_and_the_others_go_on() -> None:
    kv = manager(4)
    a = kv.add_sequence([1, 2, 3])
    before = snapshot(kv)
    with pytest.raises(NeverFits) as refused:
        kv.add_sequence(range(17))
    assert (refused.value.needed, refused.value.capacity) == (5, 4)
    assert_unchanged(kv, before)
    assert kv.extend([a], [4]).slots.tolist() == [3]
