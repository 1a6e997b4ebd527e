"""Break each thing on purpose, and see that its law is reported, and no other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from models.memory_state import free_list
from pagedkv import KVCacheManager
from pagedkv.errors import BrokenLaw
from pagedkv.memory import laws, prefix_cache
from pagedkv.memory.blocks import CACHED, FREE, NO_KEY, PENDING, PUBLISHED

IN_USE, TAIL, FORKED_TAIL, UNCOMMITTED, CACHED_BLOCK, USELESS = 0, 1, 3, 4, 6, 7


def manager() -> KVCacheManager:
    """Something of everything, in 10 blocks of 4 tokens.

    ::

        row 0: 0 published, 1 partial                 a sequence by itself
        row 1: 2 published, 3 partial                 forked
        row 2: 2,           3
        row 3: 4 pending,   5 partial                 nothing of it is computed
        free:  7, 8, 9 useless, then 6 cached
    """
    kv = KVCacheManager(10, 4, secret=bytes(16))
    a = kv.add_sequence([1, 2, 3, 4, 5])
    b = kv.add_sequence([11, 12, 13, 14, 15])
    kv.commit([a, b])
    kv.fork(b)
    kv.add_sequence([21, 22, 23, 24, 25])
    d = kv.add_sequence([31, 32, 33, 34])
    kv.commit([d])
    kv.free(d)
    kv.verify()
    assert free_list(kv) == [7, 8, 9, 6]
    return kv


def unlink(kv: KVCacheManager, block: int) -> None:
    pool = kv._memory.pool
    before, after = pool.previous_free[block], pool.next_free[block]
    pool.next_free[before], pool.previous_free[after] = after, before


def link_behind(kv: KVCacheManager, block: int, before: int) -> None:
    pool = kv._memory.pool
    after = pool.next_free[before]
    pool.next_free[before] = pool.previous_free[after] = block
    pool.next_free[block], pool.previous_free[block] = after, before


def lose_a_free_block(kv: KVCacheManager) -> None:
    unlink(kv, USELESS)
    kv._memory.pool.counters[FREE] -= 1


def free_a_block_in_use(kv: KVCacheManager) -> None:
    link_behind(kv, TAIL, 8)
    kv._memory.pool.counters[FREE] += 1


def break_a_forward_link(kv: KVCacheManager) -> None:
    kv._memory.pool.next_free[8] = 7


def break_a_backward_link(kv: KVCacheManager) -> None:
    kv._memory.pool.previous_free[8] = 9


def break_the_tail_link(kv: KVCacheManager) -> None:
    kv._memory.pool.previous_free[kv.num_blocks] = 9


def lead_out_of_the_pool(kv: KVCacheManager) -> None:
    kv._memory.pool.next_free[8] = 1000


def name_a_block_that_does_not_exist(kv: KVCacheManager) -> None:
    kv._memory.tables.entries[0, 1] = 10


def name_a_negative_block(kv: KVCacheManager) -> None:
    kv._memory.tables.entries[0, 1] = -2


def drop_a_reference(kv: KVCacheManager) -> None:
    kv._memory.pool.ref_count[2] -= 1


def count_a_reference_twice(kv: KVCacheManager) -> None:
    kv._memory.pool.ref_count[0] += 1


def count_a_user_of_a_free_block(kv: KVCacheManager) -> None:
    kv._memory.pool.ref_count[USELESS] += 1


def lose_an_index_entry(kv: KVCacheManager) -> None:
    prefix_cache.remove(kv._memory.pool, IN_USE)


def keep_a_stale_index_entry(kv: KVCacheManager) -> None:
    kv._memory.pool.key_state[IN_USE] = NO_KEY


def change_a_published_key(kv: KVCacheManager) -> None:
    kv._memory.pool.key[IN_USE, 0] ^= np.uint64(1)


def leave_a_hole_in_the_index(kv: KVCacheManager) -> None:
    """An entry far from its home, with nothing in between, cannot be found."""
    index = kv._memory.pool.key_index
    place = int(np.flatnonzero(index)[0])
    entry, index[place] = index[place], 0
    home = int(kv._memory.pool.key[entry - 1, 0]) % len(index)
    far = next(p for p in range(home + 2, home + len(index)) if not index[p % len(index)])
    index[far % len(index)] = entry


def find_one_key_twice(kv: KVCacheManager) -> None:
    pool = kv._memory.pool
    pool.key[TAIL] = pool.key[IN_USE]
    pool.key[TAIL, 1] ^= np.uint64(1)
    prefix_cache.insert(pool, TAIL)
    pool.key[TAIL, 1] ^= np.uint64(1)
    pool.key_state[TAIL] = PUBLISHED


def hold_a_block_too_many(kv: KVCacheManager) -> None:
    kv._memory.tables.num_tokens[3] = 4


def hold_a_block_too_few(kv: KVCacheManager) -> None:
    kv._memory.tables.num_tokens[0] = 9


def hold_more_than_a_row_can(kv: KVCacheManager) -> None:
    kv._memory.tables.num_tokens[0] = 10**6


def leave_a_gap_in_a_table(kv: KVCacheManager) -> None:
    entries = kv._memory.tables.entries
    entries[0, 2], entries[0, 1] = entries[0, 1], -1


def miscount_free_blocks(kv: KVCacheManager) -> None:
    kv._memory.pool.counters[FREE] += 1


def miscount_cached_blocks(kv: KVCacheManager) -> None:
    kv._memory.pool.counters[CACHED] -= 1


def keep_a_pending_key_on_a_free_block(kv: KVCacheManager) -> None:
    kv._memory.pool.key_state[USELESS] = PENDING


def publish_nothing_at_a_commit(kv: KVCacheManager) -> None:
    kv._memory.tables.num_computed[3] = 5


def lose_a_cached_block_before_a_useless_one(kv: KVCacheManager) -> None:
    unlink(kv, CACHED_BLOCK)
    link_behind(kv, CACHED_BLOCK, 8)


def compute_more_than_is_held(kv: KVCacheManager) -> None:
    kv._memory.tables.num_computed[0] = 6


def compute_less_than_nothing(kv: KVCacheManager) -> None:
    kv._memory.tables.num_computed[0] = -1


def free_a_row_in_use(kv: KVCacheManager) -> None:
    tables = kv._memory.tables
    tables.free_rows[tables.num_free_rows[0]] = 0
    tables.num_free_rows[0] += 1


def lose_a_free_row(kv: KVCacheManager) -> None:
    kv._memory.tables.num_free_rows[0] -= 1


def write_into_a_shared_block(kv: KVCacheManager) -> None:
    """What a forgotten copy leaves behind."""
    kv._memory.tables.num_tokens[1] += 1


Break = Callable[[KVCacheManager], None]
BREAKS: list[tuple[int, str, Break]] = [
    (1, "in no place: block 7", lose_a_free_block),
    (1, "free and in a table: block 1", free_a_block_in_use),
    (1, "is not linked back from block 7", break_a_forward_link),
    (1, "is not linked back from block 8", break_a_backward_link),
    (1, "does not end where its tail is", break_the_tail_link),
    (1, "leads to block 1000", lead_out_of_the_pool),
    (1, "names a block that does not exist", name_a_block_that_does_not_exist),
    (1, "names a block that does not exist", name_a_negative_block),
    (2, "wrong count: block 2", drop_a_reference),
    (2, "wrong count: block 0", count_a_reference_twice),
    (2, "wrong count: block 7", count_a_user_of_a_free_block),
    (3, "not found under its key: block 0", lose_an_index_entry),
    (3, "the blocks in the index are not the published ones", keep_a_stale_index_entry),
    (3, "not found under its key: block 0", change_a_published_key),
    (3, "not found under its key", leave_a_hole_in_the_index),
    (3, "not found under its key: block 1", find_one_key_twice),
    (4, "wrong table: row 3", hold_a_block_too_many),
    (4, "wrong table: row 0", hold_a_block_too_few),
    (4, "wrong table: row 0", hold_more_than_a_row_can),
    (4, "wrong table: row 0", leave_a_gap_in_a_table),
    (5, "5 unused and 1 cached, by a recount 4 and 1", miscount_free_blocks),
    (5, "4 unused and 0 cached, by a recount 4 and 1", miscount_cached_blocks),
    (6, "a key is pending on a free block: block 7", keep_a_pending_key_on_a_free_block),
    (6, "a key is pending on a computed block: block 4", publish_nothing_at_a_commit),
    (6, "a cached block would be lost", lose_a_cached_block_before_a_useless_one),
    (7, "not 0 to all of its tokens are computed: row 0", compute_more_than_is_held),
    (7, "not 0 to all of its tokens are computed: row 0", compute_less_than_nothing),
    (7, "the free rows are not the rows of no sequence", free_a_row_in_use),
    (7, "the free rows are not the rows of no sequence", lose_a_free_row),
    (8, "shared by sequences of other lengths: block 3", write_into_a_shared_block),
]
# Where blocks are lost or in two places, used and unused ones cannot add up either, and where the
# walk along the free list breaks off, the blocks behind are in no place.
ALSO = {
    lose_a_free_block: {5},
    free_a_block_in_use: {5},
    break_a_forward_link: {5},
    break_a_backward_link: {5},
    lead_out_of_the_pool: {5},
}


@pytest.mark.parametrize(("law", "says", "break_it"), BREAKS, ids=[b[2].__name__ for b in BREAKS])
def test_a_broken_law_is_reported_by_its_number_and_no_other(
    law: int, says: str, break_it: Break
) -> None:
    kv = manager()
    break_it(kv)
    with pytest.raises(BrokenLaw) as error:
        kv.verify()
    numbers = {int(line.removeprefix("law ").split(":")[0]) for line in error.value.laws}
    assert numbers == {law} | ALSO.get(break_it, set())
    assert says in str(error.value)
    assert all(line.startswith("law ") for line in error.value.laws)


def test_every_law_is_broken_by_one_of_these() -> None:
    assert {law for law, _, _ in BREAKS} == set(range(1, 9))


def test_all_broken_laws_are_reported_at_once() -> None:
    kv = manager()
    drop_a_reference(kv)
    keep_a_stale_index_entry(kv)
    write_into_a_shared_block(kv)
    with pytest.raises(BrokenLaw) as error:
        kv.verify()
    assert [line[:5] for line in error.value.laws] == ["law 2", "law 3", "law 8"]


def test_many_faults_of_one_kind_are_one_short_line() -> None:
    kv = KVCacheManager(100, 4)
    kv._memory.pool.ref_count[:] = 1
    assert laws.broken_laws(kv._memory, 4) == [
        "law 2: wrong count: block 0, 1, 2, 3, 4, 5, 6, 7 and 92 more"
    ]


def test_a_pool_of_any_size_is_lawful_when_new_and_when_full() -> None:
    for num_blocks in (1, 2, 7, 64):
        kv = KVCacheManager(num_blocks, 1)
        kv.verify()
        kv.add_sequence(range(num_blocks))
        kv.verify()
