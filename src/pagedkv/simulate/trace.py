"""A trace: the requests that came, whatever file or generator they come from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival, as columns.

    `arrival_s` float64 [n], seconds since the first request, never decreasing.
    `prompt_tokens`, `output_tokens` int64 [n], each at least 1.
    `session` int64 [n]: requests of one conversation share a number; -1 where unknown.
    `prefix_ids` int64 [m] and `prefix_offsets` int64 [n + 1]: request `i` owns
    `prefix_ids[prefix_offsets[i]:prefix_offsets[i + 1]]`, one id for each `granularity` tokens
    of its prompt, the last one possibly for fewer. Equal ids at equal places after equal ids
    mean an equal prefix. `granularity` is 0, and both arrays say nothing, where the trace
    has no prefix ids.
    `covers_output`: the ids go on over the output tokens too (a recorded run).
    `remarks`: what the reader had to do to the file, a line each, for the user to read.
    """

    name: str
    format: str
    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    session: NDArray[np.int64]
    prefix_ids: NDArray[np.int64]
    prefix_offsets: NDArray[np.int64]
    granularity: int = 0
    covers_output: bool = False
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.arrival_s)

    def first(self, num_requests: int) -> Trace:
        """The trace of its first `num_requests` requests, or of all where it has fewer."""
        n = min(num_requests, len(self))
        return replace(
            self,
            arrival_s=self.arrival_s[:n],
            prompt_tokens=self.prompt_tokens[:n],
            output_tokens=self.output_tokens[:n],
            session=self.session[:n],
            prefix_ids=self.prefix_ids[: self.prefix_offsets[n]],
            prefix_offsets=self.prefix_offsets[: n + 1],
        )

    @property
    def has_prefix_ids(self) -> bool:
        """Whether prefix hits can be known at all."""
        return self.granularity > 0
