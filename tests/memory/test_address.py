from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import KVCacheManager
from pagedkv.errors import InvalidInput
from pagedkv.memory import address
from pagedkv.memory.address import Address


def test_the_worked_example() -> None:
    table = np.array([7, 2, 15], dtype=np.int32)
    assert address.translate(table, 20, 16) == Address(logical_block=1, block=2, offset=4, slot=36)


@given(
    table=st.lists(st.integers(0, 2**31 - 3), min_size=1, max_size=9, unique=True),
    block_size=st.integers(1, 9),
    data=st.data(),
)
def test_slots_of_a_range_are_the_slots_of_its_tokens(
    table: list[int], block_size: int, data: st.DataObject
) -> None:
    held = len(table) * block_size
    start = data.draw(st.integers(0, held))
    stop = data.draw(st.integers(start, held))
    entries = np.array([[-1] * len(table), table], dtype=np.int32)
    slots = np.full(stop - start + 2, -7, dtype=np.int64)
    address.write_slots(entries, 1, start, stop, block_size, slots, 1)
    expected = [
        table[token // block_size] * block_size + token % block_size for token in range(start, stop)
    ]
    assert slots.tolist() == [-7, *expected, -7]
    translated = [address.translate(entries[1], token, block_size) for token in range(start, stop)]
    assert [place.slot for place in translated] == expected


def test_a_slot_may_be_larger_than_a_block_id_can_be() -> None:
    table = np.array([2**31 - 3], dtype=np.int32)
    expected = (2**31 - 3) * 2**20 + 5
    assert address.translate(table, 5, 2**20).slot == expected
    slots = np.zeros(1, dtype=np.int64)
    address.write_slots(table[None], 0, 5, 6, 2**20, slots, 0)
    assert slots[0] == expected


@pytest.mark.parametrize("token", [-1, 6, 2**63, 2**100])
def test_a_token_that_the_sequence_does_not_hold_has_no_address(token: int) -> None:
    kv = KVCacheManager(4, 4)
    a = kv.add_sequence([1, 2, 3, 4, 5, 6])
    with pytest.raises(InvalidInput, match=f"sequence {a} holds tokens 0 to 6"):
        kv.address(a, token)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7), (7, 7), (7, None)])
def test_a_range_that_the_sequence_does_not_hold_has_no_slots(start: int, stop: int) -> None:
    kv = KVCacheManager(4, 4)
    a = kv.add_sequence([1, 2, 3, 4, 5, 6])
    with pytest.raises(InvalidInput, match=f"sequence {a} holds tokens 0 to 6"):
        kv.slots(a, start, stop)
    assert kv.slots(a, 6).tolist() == kv.slots(a, 2, 2).tolist() == []
