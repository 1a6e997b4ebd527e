"""The arrays of a manager, looked at from outside."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedkv import KVCacheManager
from pagedkv.memory.block_table import ROWS


def free_list(kv: KVCacheManager) -> list[int]:
    """Blocks in the order in which they are handed out."""
    pool = kv._memory.pool
    order: list[int] = []
    block = int(pool.next_free[kv.num_blocks])
    while block != kv.num_blocks:
        assert len(order) < kv.num_blocks, "the free list has a loop"
        order.append(block)
        block = int(pool.next_free[block])
    return order


def snapshot(kv: KVCacheManager) -> dict[str, Any]:
    """Copies of all that a manager knows."""
    arrays = {
        f"{part}.{name}": array.copy()
        for part, columns in (
            ("pool", kv._memory.pool),
            ("tables", kv._memory.tables),
            ("tails", kv._tails),
        )
        for name, array in columns._asdict().items()
    }
    return {**arrays, "num_cached": kv._num_cached.copy(), "statistics": kv.statistics()}


def assert_unchanged(kv: KVCacheManager, before: dict[str, Any]) -> None:
    """Nothing differs from the snapshot; tables may have become larger, as nobody can see."""
    now = snapshot(kv)
    grown = now["tables.entries"].shape != before["tables.entries"].shape
    for name, old in before.items():
        new = now[name]
        if grown and name.startswith("tables."):
            if "free_rows" in name:  # the new rows lie below the old ones; see the next test
                continue
            new = new[tuple(slice(size) for size in old.shape)]
        elif grown and name != "statistics":
            new = new[: len(old)]
        assert np.array_equal(new, old), f"{name} changed"


def row_of(sequence: int) -> int:
    return sequence % ROWS
