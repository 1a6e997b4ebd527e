from __future__ import annotations

import numpy as np
import pytest

from pagedkv.errors import BrokenLaw
from pagedkv.memory import block_pool, prefix_cache
from pagedkv.memory.blocks import (
    CACHED,
    EVICTED,
    FREE,
    NO_KEY,
    PENDING,
    PUBLICATIONS,
    PUBLISHED,
    REVIVED,
    TAKEN,
    BlockPool,
    make_pool,
)


def free_list(pool: BlockPool) -> tuple[list[int], list[int]]:
    """The free list forwards, and backwards."""
    walks = []
    for links in (pool.next_free, pool.previous_free):
        walk, block = [], int(links[-1])
        while block != len(pool.ref_count):
            walk.append(block)
            block = int(links[block])
        walks.append(walk)
    return walks[0], walks[1]


def assert_free(pool: BlockPool, *expected: int) -> None:
    assert free_list(pool) == (list(expected), list(expected)[::-1])
    assert pool.counters[FREE] == len(expected)


def key(number: int) -> tuple[np.uint64, np.uint64]:
    return np.uint64(number), np.uint64(number + 1)


def published(pool: BlockPool, number: int) -> int:
    """A block in use that holds the content of key `number`."""
    block = block_pool.take(pool)
    block_pool.await_key(pool, block, *key(number))
    block_pool.publish(pool, block)
    return block


def test_blocks_are_handed_out_in_order_from_0() -> None:
    pool = make_pool(3)
    assert [block_pool.take(pool) for _ in range(3)] == [0, 1, 2]
    assert_free(pool)
    assert pool.ref_count.tolist() == [1, 1, 1]


def test_a_block_without_a_key_is_the_next_to_be_handed_out() -> None:
    pool = make_pool(3)
    a, b = block_pool.take(pool), block_pool.take(pool)
    block_pool.release(pool, a)
    assert_free(pool, 0, 2)
    block_pool.release(pool, b)
    assert_free(pool, 1, 0, 2)
    assert pool.counters[CACHED] == 0


def test_a_cached_block_is_the_last_to_be_handed_out() -> None:
    pool = make_pool(3)
    a, b = published(pool, 1), published(pool, 2)
    block_pool.release(pool, b)
    block_pool.release(pool, a)
    assert_free(pool, 2, 1, 0)
    assert pool.counters[CACHED] == 2
    assert pool.counters[PUBLICATIONS] == 2
    assert [block_pool.take(pool) for _ in range(3)] == [2, 1, 0]
    assert pool.counters[EVICTED] == 2
    assert pool.counters[CACHED] == 0
    assert pool.counters[TAKEN] == 5
    assert not pool.key_index.any()


def test_a_block_stays_in_use_until_its_last_user_leaves() -> None:
    pool = make_pool(2)
    block = block_pool.take(pool)
    block_pool.share(pool, block)
    block_pool.release(pool, block)
    assert_free(pool, 1)
    block_pool.release(pool, block)
    assert_free(pool, 0, 1)


@pytest.mark.parametrize("hit", [0, 1, 2])
def test_a_hit_takes_a_cached_block_off_the_list_wherever_it_is(hit: int) -> None:
    pool = make_pool(3)
    for number in range(3):
        published(pool, number)
    for block in range(3):
        block_pool.release(pool, block)
    block_pool.share(pool, hit)
    assert_free(pool, *(block for block in range(3) if block != hit))
    assert pool.ref_count[hit] == 1
    assert pool.counters[CACHED] == 2
    assert pool.counters[REVIVED] == 1
    assert pool.key_state[hit] == PUBLISHED
    block_pool.release(pool, hit)
    assert free_list(pool)[0][-1] == hit


def test_a_hit_on_a_block_in_use_leaves_the_free_list_alone() -> None:
    pool = make_pool(3)
    block = published(pool, 1)
    block_pool.share(pool, block)
    assert_free(pool, 1, 2)
    assert pool.counters[REVIVED] == 0


def test_a_key_that_was_never_published_goes_with_the_last_user() -> None:
    pool = make_pool(2)
    block = block_pool.take(pool)
    block_pool.await_key(pool, block, *key(1))
    assert pool.key_state[block] == PENDING
    assert prefix_cache.find(pool, *key(1)) == -1
    block_pool.release(pool, block)
    assert pool.key_state[block] == NO_KEY
    assert_free(pool, 0, 1)


def test_publishing_without_a_key_does_nothing() -> None:
    pool = make_pool(2)
    block = block_pool.take(pool)
    block_pool.publish(pool, block)
    assert pool.key_state[block] == NO_KEY
    assert pool.counters[PUBLICATIONS] == 0


def test_of_two_blocks_in_use_with_one_content_the_first_stays_in_the_index() -> None:
    pool = make_pool(2)
    first, second = published(pool, 1), published(pool, 1)
    assert prefix_cache.find(pool, *key(1)) == first
    assert pool.key_state[second] == NO_KEY
    assert pool.counters[PUBLICATIONS] == 1


def test_a_block_in_use_takes_the_place_of_a_free_one_with_its_content() -> None:
    pool = make_pool(4)
    first, other = published(pool, 1), published(pool, 2)
    block_pool.release(pool, other)
    block_pool.release(pool, first)
    second = published(pool, 1)
    assert prefix_cache.find(pool, *key(1)) == second
    assert pool.key_state[first] == NO_KEY
    assert_free(pool, first, 3, other)  # nothing is lost when it is handed out
    assert pool.counters[CACHED] == 1
    assert pool.counters[EVICTED] == 0


def test_a_block_without_users_cannot_be_released() -> None:
    pool = make_pool(2)
    block = block_pool.take(pool)
    block_pool.release(pool, block)
    with pytest.raises(BrokenLaw, match="law 2"):
        block_pool.release(pool, block)
    assert_free(pool, 0, 1)
    assert pool.ref_count.tolist() == [0, 0]
