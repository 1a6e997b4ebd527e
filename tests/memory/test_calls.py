"""State as it crosses from Python: every array arrives as itself."""

from __future__ import annotations

from pagedkv import KVCacheManager
from pagedkv.memory import calls, extension
from pagedkv.memory.allocation import make_memory


def test_each_array_arrives_under_its_own_name_with_its_shape_and_type() -> None:
    memory, tails = make_memory(5, 3, 7), extension.make_tails(3, 4)
    state = calls.state_of(memory, tails)
    arrived = (*calls._memory_in(state), calls._tails_in(state))
    for sent_columns, columns in zip((*memory, tails), arrived, strict=True):
        for name, sent, column in zip(sent_columns._fields, sent_columns, columns, strict=True):
            assert (column.shape, column.dtype) == (sent.shape, sent.dtype), name
            assert column.ctypes.data == sent.ctypes.data, name


def test_tables_that_have_grown_are_those_that_are_used() -> None:
    kv = KVCacheManager(num_blocks=300, block_size=2)
    kept = [kv.add_sequence([i, i, i]) for i in range(10)]
    for i in range(40):  # more rows, then wider ones, each a new array
        kept.append(kv.add_sequence(list(range(i + 1))))
        kv.commit([kept[-1]])
        kv.free(kept.pop(0))
        kv.verify()
    assert [kv.num_tokens(s) for s in kept] == list(range(31, 41))
