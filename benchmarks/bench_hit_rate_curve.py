"""The exact hit rate at every memory size, of the Mooncake conversation trace at its own ids."""

from __future__ import annotations

import time

from peers import TRACES, report

from pagedkv.simulate.hit_rate_curve import hit_rate_curve, lru_hits
from pagedkv.simulate.trace_formats import read_trace

RUNS = 7


def main() -> None:
    if not TRACES.exists():
        print(f"no traces at {TRACES}: nothing to measure")
        return
    ids = read_trace(str(TRACES / "mooncake_conversation.jsonl")).prefix_ids
    hits = lru_hits(ids)
    for blocks, expected in ((4_096, 8.7553), (16_384, 26.5556), (len(hits) - 1, 36.6412)):
        print(
            f"{blocks:,} blocks: {100 * hits[blocks] / len(ids):.4f} % hit, expected {expected} %"
        )
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        hit_rate_curve(ids, block_size=512)
        seconds.append(time.perf_counter() - start)
    report("hit-rate curve, 288,500 accesses", seconds, [], unit="s", bar="under 0.2 s")


if __name__ == "__main__":
    main()
