"""Copy-on-write: a block with several users is never written to.

Only a partial last block can be both shared and about to be written: full blocks do not change,
and a fresh block has one user. The sequence that writes takes a new block in place of the shared
one and the caller copies the page. The last of the users needs no copy: by then it is alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled_inline
from pagedkv.memory import block_pool
from pagedkv.memory.block_table import BlockTables
from pagedkv.memory.blocks import BlockPool


@compiled_inline
def replace_if_shared(
    pool: BlockPool,
    tables: BlockTables,
    row: int,
    place: int,
    copies: NDArray[np.int32],
    num_copies: int,
) -> bool:
    """Give `row` a block of its own at `place` of its table if others use that one too.

    Then `copies[num_copies]`, of int32 [.., 2], becomes (from, to); returns whether it did.
    """
    old = int(tables.entries[row, place])
    if pool.ref_count[old] == 1:
        return False
    new = block_pool.take(pool)
    block_pool.release(pool, old)
    tables.entries[row, place] = new
    copies[num_copies, 0] = old
    copies[num_copies, 1] = new
    return True
