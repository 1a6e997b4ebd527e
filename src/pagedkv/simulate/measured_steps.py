"""Steps of a recorded run: how long each took, and how much it computed and read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class MeasuredSteps:
    """A step a place, in the order in which they were; counted as `step_time_s` counts.

    `took_s` float64 [n], above 0: seconds until the next step began, where anybody was under way.
    `prefill_tokens`, `decode_tokens`, `context_tokens`, `pairs` int64 [n], at least 0.
    """

    took_s: NDArray[np.float64]
    prefill_tokens: NDArray[np.int64]
    decode_tokens: NDArray[np.int64]
    context_tokens: NDArray[np.int64]
    pairs: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.took_s)
