"""A trace: the requests that came, whatever file or generator they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pagedkv.simulate.measured_steps import MeasuredSteps


def _no_rows() -> NDArray[np.int64]:
    return np.zeros(0, dtype=np.int64)


def _no_times() -> NDArray[np.float64]:
    return np.zeros(0, dtype=np.float64)


@dataclass(frozen=True)
class Interruptions:
    """What ended requests before their time, where a recorded run is repeated step by step.

    `cancelled` int64 [k] are rows of the trace whose client went away at `cancelled_s`
    float64 [k], in the order in which they left. `failed` int64 [j] are rows that ended with
    the step that began at `failed_s` float64 [j] and failed. Times never decrease.
    """

    cancelled: NDArray[np.int64] = field(default_factory=_no_rows)
    cancelled_s: NDArray[np.float64] = field(default_factory=_no_times)
    failed: NDArray[np.int64] = field(default_factory=_no_rows)
    failed_s: NDArray[np.float64] = field(default_factory=_no_times)

    def first(self, num_rows: int) -> Interruptions:
        """Those of the first `num_rows` rows."""
        left, failed = self.cancelled < num_rows, self.failed < num_rows
        return Interruptions(
            self.cancelled[left], self.cancelled_s[left], self.failed[failed], self.failed_s[failed]
        )


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
    A request without ids in a trace that has them is one of which nothing is kept or found.
    `covers_output`: the ids go on over the output tokens too (a recorded run).
    `remarks`: what the reader had to do to the file, a line each, for the user to read.
    `sample` int64 [n], or None where all are 0: a row whose sample is k is a further answer to
    the prompt of the row k before it, and begins by sharing its blocks.
    `interruptions`: of a run that is repeated by its steps; a request that is interrupted has
    the output tokens that it had got until then, maybe 0.
    `recorded_with`: the settings of the engine that a recorded run had, by the names of the
    options of `pagedkv simulate`; None for other traces.
    `measured_steps`: how long the steps of a recorded run took; None where that is not known.
    `measured_ttft_s` float64 [n]: how long each request waited for its first token in that run,
    NaN where it got none; None where nothing is known, or where time is counted in steps.
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
    sample: NDArray[np.int64] | None = None
    interruptions: Interruptions | None = None
    recorded_with: Mapping[str, int | float | bool] | None = None
    measured_steps: MeasuredSteps | None = None
    measured_ttft_s: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.arrival_s)

    def first(self, num_requests: int) -> Trace:
        """The trace of its first `num_requests` requests, or of all where it has fewer."""
        n = min(num_requests, len(self))
        if self.sample is not None:
            begins = np.append(np.flatnonzero(self.sample == 0), len(self))
            n = int(begins[min(num_requests, len(begins) - 1)])
        return replace(
            self,
            arrival_s=self.arrival_s[:n],
            prompt_tokens=self.prompt_tokens[:n],
            output_tokens=self.output_tokens[:n],
            session=self.session[:n],
            prefix_ids=self.prefix_ids[: self.prefix_offsets[n]],
            prefix_offsets=self.prefix_offsets[: n + 1],
            sample=None if self.sample is None else self.sample[:n],
            interruptions=None if self.interruptions is None else self.interruptions.first(n),
            measured_ttft_s=None if self.measured_ttft_s is None else self.measured_ttft_s[:n],
        )

    def at_load(self, factor: float) -> Trace:
        """The same requests, coming `factor` times as fast: no run was measured at that load."""
        return replace(self, arrival_s=self.arrival_s / factor, measured_ttft_s=None)

    @property
    def has_prefix_ids(self) -> bool:
        """Whether prefix hits can be known at all."""
        return self.granularity > 0

    @property
    def num_requests(self) -> int:
        """Requests; one with several answers has as many rows."""
        return len(self) if self.sample is None else int((self.sample == 0).sum())

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of the requests, each counted once however many answers it has."""
        return int(self.prompt_tokens.sum(where=True if self.sample is None else self.sample == 0))

    @property
    def has_samples(self) -> bool:
        """Whether some requests have several answers."""
        return self.sample is not None and bool(self.sample.any())
