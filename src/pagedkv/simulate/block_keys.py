"""From the prefix ids of a trace to the block keys of the memory.

An id names `granularity` tokens after everything before them. Ids coarser than a block are split
into block keys, finer ones combined: a block's key is made of its parent's key and of every id
whose tokens it touches, in whole or in part. Blocks that reach past the tokens which the ids cover
(a partial last block of the prompt, and the output) are nobody else's: their key is made of the
sequence's own number. Ids that go on over the output are those of the answer that was recorded:
the first sample repeats it, any other sample says something else.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled_in_place
from pagedkv.memory.block_key import MAX_TOKEN_ID, block_key
from pagedkv.simulate.trace import Trace

_SECRET = np.array([0x7061676564, 0x6B76], dtype=np.uint64)
"""Fixed, so that a simulation gives the same bytes each time; a trace holds nobody's tokens."""


def sequence_keys(
    trace: Trace, *, block_size: int, num_samples: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]]:
    """Keys of all blocks of all sequences: sequence `r * num_samples + j` is sample j of request r.

    Returns each sequence's first key and number of keys, int64 [n], and the keys, uint64 [m, 2],
    where a sequence's blocks are all that the K and V of its prompt and output fill. A request
    without ids, in a trace that has them, has no keys.
    """
    num_sequences = len(trace) * num_samples
    if not trace.has_prefix_ids:
        none = np.zeros(num_sequences, dtype=np.int64)
        return none, none, np.zeros((0, 2), dtype=np.uint64)
    computed = np.repeat(trace.prompt_tokens + trace.output_tokens - 1, num_samples)
    num_keys = computed // block_size
    num_keys[np.repeat(np.diff(trace.prefix_offsets) == 0, num_samples)] = 0
    ids = _small_ids(trace.prefix_ids)
    first_key = np.cumsum(num_keys) - num_keys
    keys = np.empty((int(num_keys.sum()), 2), dtype=np.uint64)
    covered = np.repeat(trace.prompt_tokens, num_samples)
    if trace.covers_output:
        covered[::num_samples] += trace.output_tokens
    _write_keys(
        _SECRET,
        ids,
        trace.prefix_offsets,
        covered,
        trace.granularity,
        block_size,
        num_samples,
        first_key,
        num_keys,
        keys,
    )
    return first_key, num_keys, keys


def _small_ids(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """`ids` themselves where each fits into half a word, as a key takes them; else renumbered.

    Readers and workloads number from 0; a trace that somebody builds may have hashes for ids.
    """
    if len(ids) == 0 or (ids.min() >= 0 and ids.max() <= MAX_TOKEN_ID):
        return ids
    return np.unique(ids, return_inverse=True)[1].astype(np.int64)


@compiled_in_place
def _write_keys(
    secret: NDArray[np.uint64],
    ids: NDArray[np.int64],
    offsets: NDArray[np.int64],
    covered: NDArray[np.int64],
    granularity: int,
    block_size: int,
    num_samples: int,
    first_key: NDArray[np.int64],
    num_keys: NDArray[np.int64],
    keys: NDArray[np.uint64],
) -> None:
    for s in range(len(first_key)):
        request = s // num_samples
        start = offsets[request]
        key0, key1 = secret[0], secret[1]
        for i in range(num_keys[s]):
            if (i + 1) * block_size <= covered[s]:
                first = start + i * block_size // granularity
                last = start + ((i + 1) * block_size - 1) // granularity
                key0, key1 = block_key(secret, key0, key1, ids, first, last + 1)
            else:
                key0, key1 = block_key(secret, key0, key1 ^ np.uint64(s + 1), ids, 0, 0)
            keys[first_key[s] + i, 0] = key0
            keys[first_key[s] + i, 1] = key1
