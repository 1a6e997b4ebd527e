"""The last minutes of what the page draws over time, also while nobody watches."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pagedkv.engine.statistics import EngineStatistics

SAMPLE_FIELDS = (
    "s",
    "tokens_per_s",
    "hit_rate",
    "used_share",
    "cached_share",
    "fill",
)
"""Of a sample: when, in seconds; output tokens a second since the sample
before; of the tokens admitted since then the share that was cached (-1: none were admitted); of
all blocks the share that is used and the share that is cached; of the slots in used blocks the
share that holds a token (-1: no block is used)."""

MINUTES = 5


class History:
    """One sample a second while there are steps or looks, for `MINUTES` minutes."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, ...]] = deque(maxlen=60 * MINUTES)
        self._last: tuple[float, int, int, int] | None = None
        self.num_samples = 0
        """Samples made so far, those that are kept no more too."""

    def is_due(self, now_s: float) -> bool:
        """Whether the last sample is a second old. All times are on one clock."""
        return self._last is None or now_s - self._last[0] >= 1.0

    def note(self, now_s: float, statistics: EngineStatistics) -> None:
        """Make a sample of what is so now, where one is due. The first time is for comparison."""
        memory, tokens = statistics.memory, statistics.output_tokens
        if not self.is_due(now_s):
            return
        last, self._last = self._last, (now_s, tokens, memory.query_tokens, memory.hit_tokens)
        if last is None:
            return
        last_s, last_tokens, last_queries, last_hits = last
        asked = memory.query_tokens - last_queries
        slots = memory.used_blocks * memory.block_size
        self._samples.append(
            (
                now_s,
                (tokens - last_tokens) / (now_s - last_s),
                (memory.hit_tokens - last_hits) / asked if asked else -1.0,
                memory.used_blocks / memory.num_blocks,
                memory.cached_blocks / memory.num_blocks,
                memory.held_tokens / slots if slots else -1.0,
            )
        )
        self.num_samples += 1

    def since(self, num_samples: int, began_s: float) -> NDArray[np.float32]:
        """The samples that came after so many, float32 [n, 6], see `SAMPLE_FIELDS`.

        Their times are told from `began_s` on, and are below 0 for those before.
        """
        num_new = min(self.num_samples - num_samples, len(self._samples))
        newest = list(self._samples)[len(self._samples) - num_new :]
        rows = np.array(newest, dtype=np.float64).reshape(-1, len(SAMPLE_FIELDS))
        rows[:, 0] -= began_s
        return rows.astype(np.float32)
