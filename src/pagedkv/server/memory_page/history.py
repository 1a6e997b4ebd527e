"""The last minutes of what the page draws over time, for whoever begins to watch later."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

SAMPLE_FIELDS = (
    "s",
    "tokens_per_s",
    "hit_rate",
    "used_share",
    "cached_share",
    "fill",
)
"""Of a sample: when, in seconds since the watch began; output tokens a second since the sample
before; of the tokens admitted since then the share that was cached (-1: none were admitted); of
all blocks the share that is used and the share that is cached; of the slots in used blocks the
share that holds a token (-1: no block is used)."""

MINUTES = 5


class History:
    """One sample a second, for `MINUTES` minutes."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, ...]] = deque(maxlen=60 * MINUTES)
        self._last: tuple[float, int, int, int] | None = None

    def note(self, now_s: float, counters: dict[str, int]) -> bool:
        """Look at the counters of now; returns whether that made a sample, once a second."""
        tokens, queries, hits = (
            counters["output_tokens"],
            counters["query_tokens"],
            counters["hit_tokens"],
        )
        if self._last is None:
            self._last = (now_s, tokens, queries, hits)
            return False
        last_s, last_tokens, last_queries, last_hits = self._last
        if now_s - last_s < 1.0:
            return False
        asked = queries - last_queries
        slots = counters["used_blocks"] * counters["block_size"]
        self._samples.append(
            (
                now_s,
                (tokens - last_tokens) / (now_s - last_s),
                (hits - last_hits) / asked if asked else -1.0,
                counters["used_blocks"] / counters["num_blocks"],
                counters["cached_blocks"] / counters["num_blocks"],
                counters["held_tokens"] / slots if slots else -1.0,
            )
        )
        self._last = (now_s, tokens, queries, hits)
        return True

    @property
    def newest(self) -> NDArray[np.float32]:
        """The newest sample, float32 [1, 6], or none."""
        return self._rows(list(self._samples)[-1:])

    @property
    def all(self) -> NDArray[np.float32]:
        """All samples, float32 [n, 6], see `SAMPLE_FIELDS`."""
        return self._rows(list(self._samples))

    @staticmethod
    def _rows(samples: list[tuple[float, ...]]) -> NDArray[np.float32]:
        return np.array(samples, dtype=np.float32).reshape(-1, len(SAMPLE_FIELDS))
