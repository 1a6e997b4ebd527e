from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagedkv.memory import prefix_cache
from pagedkv.memory.blocks import BlockPool, make_pool

LOW = 2**32


def put(pool: BlockPool, block: int, key: tuple[int, int]) -> None:
    pool.key[block] = key
    prefix_cache.insert(pool, block)


def find(pool: BlockPool, key: tuple[int, int]) -> int:
    return prefix_cache.find(pool, np.uint64(key[0]), np.uint64(key[1]))


class IndexBesideDict(RuleBasedStateMachine):
    """Keys whose homes are few, the last place among them, so that clusters form and wrap around.

    Some share the tag too and differ only in what lies outside of it.
    """

    @initialize(num_blocks=st.integers(1, 9))
    def begin(self, num_blocks: int) -> None:
        self.pool = make_pool(num_blocks)
        last = len(self.pool.key_index) - 1
        homes = [0, 1, last - 1, last]
        self.keys = [
            (high * LOW + turn * (last + 1) + home, second)
            for home in homes
            for turn, high, second in [(0, 0, 0), (1, 0, 0), (0, LOW - 1, 0), (0, 0, 1)]
        ]
        self.blocks: dict[tuple[int, int], int] = {}

    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        unused = sorted(set(range(len(self.pool.ref_count))) - set(self.blocks.values()))
        new = [key for key in self.keys if key not in self.blocks]
        if unused:
            block, key = data.draw(st.sampled_from(unused)), data.draw(st.sampled_from(new))
            put(self.pool, block, key)
            self.blocks[key] = block

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.blocks:
            key = data.draw(st.sampled_from(sorted(self.blocks)))
            prefix_cache.remove(self.pool, self.blocks.pop(key))

    @invariant()
    def finds_what_the_dict_finds(self) -> None:
        for key in self.keys:
            assert find(self.pool, key) == self.blocks.get(key, -1)
        assert np.count_nonzero(self.pool.key_index) == len(self.blocks)


TestIndexBesideDict = IndexBesideDict.TestCase
TestIndexBesideDict.settings = settings(max_examples=settings.default.max_examples // 2)


@given(order=st.permutations(range(8)))
def test_every_block_can_be_indexed_and_removed_in_any_order(order: list[int]) -> None:
    pool = make_pool(8)
    key = [(block * 2**60 + 15, block) for block in range(8)]  # one home, the last place
    for block in order:
        put(pool, block, key[block])
    for i, block in enumerate(order):
        prefix_cache.remove(pool, block)
        gone = set(order[: i + 1])
        assert [find(pool, key[b]) for b in range(8)] == [-1 if b in gone else b for b in range(8)]
    assert not pool.key_index.any()


def test_at_most_one_entry_in_eight_of_the_index_is_ever_used() -> None:
    for num_blocks in (1, 2, 3, 4, 5, 1000):
        assert len(make_pool(num_blocks).key_index) >= 8 * num_blocks


def test_a_key_of_all_ones_and_one_of_all_zeros_are_keys_like_others() -> None:
    pool = make_pool(2)
    put(pool, 0, (0, 0))
    put(pool, 1, (2**64 - 1, 2**64 - 1))
    assert find(pool, (0, 0)) == 0
    assert find(pool, (2**64 - 1, 2**64 - 1)) == 1
    assert find(pool, (0, 1)) == -1
    assert find(pool, (2**64 - 1, 0)) == -1
