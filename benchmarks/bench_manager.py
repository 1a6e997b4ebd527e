"""The memory against vLLM's `KVCacheManager`: real prompts looked up, allocated and freed in order.

Both get the same block keys, made beforehand, 3,000 requests of the Mooncake conversation trace at
block size 16. Hit tokens must be equal at every size; vLLM keeps one of its blocks back.

One replay of ours takes a sixth of a second and one of vLLM's some seconds, in which a shared
machine is now fast and now slow. So ours is repeated until it has taken about as long.
"""

from __future__ import annotations

import time

from peers import TRACES, peer_figure, report

from pagedkv import KVCacheManager
from pagedkv.simulate.block_keys import sequence_keys
from pagedkv.simulate.trace_formats import read_trace

BLOCK_SIZE = 16
ROUNDS = 3
REPEATS = 40

# Hit tokens of vLLM's manager: trace, requests, usable blocks -> hit tokens.
VLLM_HITS = (
    ("conversation", 3_000, 19_999, 1_574_624),
    ("conversation", 3_000, 49_999, 1_832_064),
    ("conversation", 3_000, 199_999, 5_953_520),
    ("conversation", 3_000, 999_999, 12_546_016),
    ("synthetic", 1_500, 99_999, 765_760),
)


def replay(prompts: list[tuple[int, object]], num_blocks: int) -> tuple[float, int]:
    """Seconds and hit tokens of looking up, allocating, publishing and freeing each prompt."""
    kv = KVCacheManager(num_blocks, BLOCK_SIZE)
    hits = 0
    start = time.perf_counter()
    for num_tokens, keys in prompts:
        sequence = kv.add_keyed_sequence(num_tokens, keys)
        hits += kv.num_cached_tokens(sequence)
        kv.commit([sequence])
        kv.free(sequence)
    seconds = time.perf_counter() - start
    kv.verify()
    return seconds, hits


def prompts_of(name: str, requests: int) -> list[tuple[int, object]]:
    """Length and block keys of each prompt."""
    trace = read_trace(str(TRACES / f"mooncake_{name}.jsonl")).first(requests)
    first_key, _, keys = sequence_keys(trace, block_size=BLOCK_SIZE, num_samples=1)
    return [
        (int(tokens), keys[first : first + tokens // BLOCK_SIZE])
        for tokens, first in zip(trace.prompt_tokens, first_key, strict=True)
    ]


def main() -> None:
    if not TRACES.exists():
        print(f"no traces at {TRACES}: nothing to measure")
        return
    for name, requests, usable, expected in VLLM_HITS:
        prompts = prompts_of(name, requests)
        _, hits = replay(prompts, usable)
        print(f"{name}, {usable:,} blocks: {hits:,} hit tokens, vLLM {expected:,}")
        if hits != expected:
            raise SystemExit("hit tokens differ from vLLM's")
    prompts = prompts_of("conversation", 3_000)
    num_blocks = sum(-(-tokens // BLOCK_SIZE) for tokens, _ in prompts)
    ours: list[float] = []
    peers: list[float | None] = []
    for _ in range(ROUNDS):
        pattern = r"([\d.]+) Mblocks/s"
        peers.append(peer_figure("vllm_manager.py", "200000", "3000", pattern=pattern))
        seconds = sum(replay(prompts, 199_999)[0] for _ in range(REPEATS))
        ours.append(REPEATS * num_blocks / seconds / 1e6)
    report(
        "manager, Mooncake conversation",
        ours,
        peers,
        unit="million blocks/s",
        bar="at least 40 times",
    )


if __name__ == "__main__":
    main()
