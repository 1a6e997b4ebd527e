"""An LRU memory of blocks, replayed access by access."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable


def lru_hits_at(accesses: Iterable[Hashable], num_blocks: int) -> int:
    """Number of accesses that find their block in an LRU memory of `num_blocks`."""
    memory: OrderedDict[Hashable, None] = OrderedDict()
    hits = 0
    for block in accesses:
        if block in memory:
            hits += 1
            memory.move_to_end(block)
        else:
            memory[block] = None
            if len(memory) > num_blocks:
                memory.popitem(last=False)
    return hits
