"""A decode step against vLLM's `KVCacheManager`: 256 sequences, one token more for each.

Ours returns slots, block tables and lengths as arrays; vLLM's only takes the blocks.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np
from peers import peer_figure, report

from pagedkv import KVCacheManager

SEQUENCES, PROMPT_TOKENS, STEPS, RUNS = 256, 1_000, 256, 5


def microseconds_a_step() -> float:
    """The median over 256 steps, each from Python."""
    num_blocks = SEQUENCES * (PROMPT_TOKENS + STEPS) // 16 + SEQUENCES + 10
    kv = KVCacheManager(num_blocks, block_size=16, prefix_caching=False)
    prompt = [0] * PROMPT_TOKENS
    sequences = np.array([kv.add_sequence(prompt) for _ in range(SEQUENCES)])
    tokens = np.ones(SEQUENCES, dtype=np.int64)
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        kv.extend(sequences, tokens)
        seconds.append(time.perf_counter() - start)
    return median(seconds) * 1e6


def main() -> None:
    microseconds_a_step()  # load compiled code
    ours: list[float] = []
    peers: list[float | None] = []
    for i in range(RUNS):
        ours.append(microseconds_a_step())
        if i < 3:
            pattern = r"(\d+) us/step"
            peers.append(peer_figure("vllm_decode_step.py", str(SEQUENCES), pattern=pattern))
    report(
        "extend, 256 sequences by one token",
        ours,
        peers,
        unit="µs a step",
        bar="at least 100 times, at most 25 µs on an idle core",
        better="less",
    )


if __name__ == "__main__":
    main()
