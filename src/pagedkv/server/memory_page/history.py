"""The last minutes of what the page draws over time, for whoever begins to watch later.

Kept whether anybody watches or not: once a second a few counters are read that are there anyway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

SAMPLE_FIELDS = (
    "age_s",
    "tokens_per_s",
    "hit_rate",
    "used_share",
    "cached_share",
    "fill",
)
"""Of a sample: how long ago it was taken; output tokens a second since the sample before; of the
tokens admitted since then the share that was cached (-1: none were admitted); of all blocks the
share that is used and the share that is cached; of the slots in used blocks the share that holds a
token (-1: no block is used)."""

MINUTES = 5
INTERVAL_S = 1.0


class History:
    """One sample a second, for `MINUTES` minutes.

    Samples are noted between two steps of the engine, and may be read by another thread meanwhile.
    """

    def __init__(self) -> None:
        self._samples: tuple[tuple[float, ...], ...] = ()  # replaced, since it is read meanwhile
        self._last: tuple[float, int, int, int] | None = None
        self.due_s = -math.inf
        """When the next sample is due, by the clock of `note`."""

    def note(self, now_s: float, counters: Mapping[str, int]) -> None:
        """Make a sample of the counters of now. The first are only what the next are told from."""
        tokens, queries, hits = (
            counters["output_tokens"],
            counters["query_tokens"],
            counters["hit_tokens"],
        )
        if self._last is not None:
            last_s, last_tokens, last_queries, last_hits = self._last
            asked = queries - last_queries
            slots = counters["used_blocks"] * counters["block_size"]
            sample = (
                now_s,
                (tokens - last_tokens) / (now_s - last_s),
                (hits - last_hits) / asked if asked else -1.0,
                counters["used_blocks"] / counters["num_blocks"],
                counters["cached_blocks"] / counters["num_blocks"],
                counters["held_tokens"] / slots if slots else -1.0,
            )
            self._samples = (*self._samples[1 - 60 * MINUTES :], sample)
        self._last = (now_s, tokens, queries, hits)
        self.due_s = now_s + INTERVAL_S

    def samples(self, now_s: float, *, after_s: float = -math.inf) -> NDArray[np.float32]:
        """Samples taken later than `after_s` and by `now_s`, float32 [n, 6], see `SAMPLE_FIELDS`.

        They have ages rather than times: of a server that has run for months single precision
        could not tell seconds.
        """
        rows = []
        for taken_s, *figures in reversed(self._samples):
            if taken_s <= after_s:
                break
            if taken_s <= now_s:
                rows.append((now_s - taken_s, *figures))
        return np.array(rows[::-1], dtype=np.float32).reshape(-1, len(SAMPLE_FIELDS))
