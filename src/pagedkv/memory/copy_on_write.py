"""Copy-on-write: a block with several users is never written to.

Only a partial last block can be both shared and about to be written: full blocks do not change,
and a fresh block has one user. The sequence that writes takes a new block in place of the shared
one and the caller copies the page. The last of the users needs no copy: by then it is alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled_in_place
from pagedkv.memory import block_pool
from pagedkv.memory.block_table import BlockTables
from pagedkv.memory.blocks import BlockPool


@compiled_in_place
def shared_tail(pool: BlockPool, tables: BlockTables, row: int, block_size: int) -> int:
    """The partial last block of `row` if others use it too, else -1."""
    num_tokens = tables.num_tokens[row]
    if num_tokens % block_size == 0:
        return -1
    block = int(tables.entries[row, num_tokens // block_size])
    return block if pool.ref_count[block] > 1 else -1


@compiled_in_place
def replace_tail(
    pool: BlockPool, tables: BlockTables, row: int, block_size: int, copy: NDArray[np.int32]
) -> None:
    """Give `row` a block of its own in place of its shared tail; `copy` int32 [2] is (from, to)."""
    place = tables.num_tokens[row] // block_size
    old = int(tables.entries[row, place])
    new = block_pool.take(pool)
    block_pool.release(pool, old)
    tables.entries[row, place] = new
    copy[0] = old
    copy[1] = new
