"""Hashing token ids to block keys, one core, SipHash-2-4-128 chained over 16-token blocks."""

from __future__ import annotations

import time

import numpy as np
from peers import report

from pagedkv.memory.block_key import root_key, write_block_keys

BLOCK_SIZE, BLOCKS, RUNS = 16, 500_000, 7


def main() -> None:
    secret = np.array([1, 2], dtype=np.uint64)
    root = root_key(secret, {})
    token_ids = np.random.default_rng(0).integers(0, 128_000, BLOCKS * BLOCK_SIZE)
    keys = np.empty((BLOCKS, 2), dtype=np.uint64)
    write_block_keys(secret, root, token_ids[:BLOCK_SIZE], BLOCK_SIZE, keys)
    rates = []
    for _ in range(RUNS):
        start = time.process_time()  # the bar is for a core, whoever else is on it
        write_block_keys(secret, root, token_ids, BLOCK_SIZE, keys)
        rates.append(BLOCKS / (time.process_time() - start) / 1e6)
    report("hashing", rates, [], unit="million blocks/s", bar="at least 10 million a core")


if __name__ == "__main__":
    main()
