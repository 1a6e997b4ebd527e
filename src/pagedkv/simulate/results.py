"""What a simulation found: frozen records that the table, the report and the JSON all read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

KINDS = ("token_states", "reserved", "never_used", "unusable", "cached", "free")
"""What a slot of the KV memory can be, in the order in which charts stack them."""


@dataclass(frozen=True)
class Percentiles:
    """Three percentiles of one quantity, in its own unit; NaN where nothing was observed."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Timeline:
    """The run over time, each row the time-weighted mean of one interval.

    `start_s`, `end_s` float64 [n]; `share` float64 [n, len(KINDS)], rows sum to 1;
    `running`, `waiting` float64 [n], requests.
    """

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    share: NDArray[np.float64]
    running: NDArray[np.float64]
    waiting: NDArray[np.float64]


@dataclass(frozen=True)
class MemoryMap:
    """Snapshots of the physical memory: `kind` uint8 [rows, columns], an index into KINDS.

    Each row stands for `slots_per_row` neighbouring slots and shows one of their kinds, so chosen
    that among many rows each kind is seen in proportion; column `j` was taken at `time_s[j]`.
    `shared` uint8 [rows, columns] is 1 where several sequences use what is shown, chosen likewise.
    """

    time_s: NDArray[np.float64]
    kind: NDArray[np.uint8]
    shared: NDArray[np.uint8]
    slots_per_row: float


@dataclass(frozen=True)
class SchemeResult:
    """One scheme over the whole trace. Shares are of the KV memory, 0 to 1."""

    scheme: str  # "paged", "reserve-max", "reserve-pow2", "reserve-exact"
    placement: str | None  # "first-fit", "best-fit", "buddy"; None for paged
    share: dict[str, float]  # kind -> time-weighted share while requests wait or run; sums to 1
    running_mean: float
    running_peak: int
    preemptions: int
    recomputed_tokens: int
    hit_rate_first: float | None  # None without prefix ids, caching or anybody admitted
    hit_rate_all: float | None
    hit_tokens_first: int
    saved_by_sharing: float  # share of block-table entries that name an already counted block
    requests_per_s: float
    output_tokens_per_s: float
    ttft_s: Percentiles
    tpot_s: Percentiles
    duration_s: float
    num_steps: int
    began: int  # sequences that got a first token
    finished: int
    refused: tuple[str, ...]  # one line for each request that could never fit
    timeline: Timeline
    memory_map: MemoryMap


@dataclass(frozen=True)
class HitRateCurve:
    """Exact LRU hit rate at every memory size.

    `blocks` int64 [k], ascending; `hit_rate` float64 [k]: share of the trace's `accesses` block
    accesses that hit with that many blocks, for every size at which the rate changes
    (thinned to at most a few thousand points for drawing, ends kept). `ceiling` is the rate with
    unlimited memory. `smallest`: share of the ceiling (0.5, 0.8, 0.95, 1.0) -> fewest blocks.
    """

    block_size: int
    accesses: int
    distinct: int
    blocks: NDArray[np.int64]
    hit_rate: NDArray[np.float64]
    ceiling: float
    smallest: dict[float, int]


@dataclass(frozen=True)
class PaperFigure:
    """One number of a published paper beside ours.

    `paper` and `ours` are in `unit` ("%", "requests", ...). `bar` is what the difference may be:
    so many points (of the unit), so many percent of the paper's number, or, for "at least",
    the number that ours must not be below. `is_fitted`: a parameter of the simulation was chosen
    so that ours agrees; it predicts nothing.
    """

    figure: str  # "figure 2"
    system: str  # "Orca (Max)"
    quantity: str  # "token states"
    unit: str
    paper: float
    ours: float
    bar: float
    bar_kind: Literal["points", "percent", "at least"]
    is_fitted: bool = False

    @property
    def difference(self) -> float:
        """Ours less the paper's: in percent of the paper's for "percent", else in the unit."""
        if self.bar_kind == "percent":
            return 100.0 * (self.ours - self.paper) / self.paper
        return self.ours - self.paper

    @property
    def bar_in_words(self) -> str:
        """How far ours may be from the paper's, for a narrow column."""
        if self.bar_kind == "at least":
            return f"min {self.bar:g}"
        return f"± {self.bar:g}" + (" %" if self.bar_kind == "percent" else "")

    @property
    def within_bar(self) -> bool:
        """Whether the difference is one that the bar allows (a bar met exactly is met)."""
        if self.bar_kind == "at least":
            return self.ours >= self.bar
        return abs(self.difference) <= self.bar

    @property
    def verdict(self) -> str:
        """Whether it holds, in a word: yes, NO, or fitted where it had to."""
        if not self.within_bar:
            return "NO"
        return "fitted" if self.is_fitted else "yes"


def count_within_bar(figures: Sequence[PaperFigure]) -> str:
    """How many figures are within their bars, those that were fitted counted apart."""
    fitted = [figure for figure in figures if figure.is_fitted]
    predicted = [figure for figure in figures if not figure.is_fitted]
    counted = f"{sum(f.within_bar for f in predicted)} of {len(predicted)} figures within the bar"
    if not fitted:
        return f"{counted}."
    if all(figure.within_bar for figure in fitted):
        return f"{counted}, and {len(fitted)} fitted ones."
    return f"{counted}, and {sum(f.within_bar for f in fitted)} of {len(fitted)} fitted ones."


@dataclass(frozen=True)
class SimulationResult:
    """Everything one `pagedkv simulate` found."""

    command: str  # what to type to run it again
    settings: dict[str, str | int | float | bool | None]  # every setting, in order, by flag name
    trace_name: str
    trace_format: str
    num_requests: int
    num_answers: int  # as many as requests, where each has one
    prompt_tokens: int  # of the requests
    output_tokens: int  # of all answers
    num_blocks: int
    block_size: int
    bytes_per_token: int | None  # None when only --num-blocks was given
    schemes: tuple[SchemeResult, ...]
    curve: HitRateCurve | None
    remarks: tuple[str, ...]
    comparison: tuple[PaperFigure, ...] = ()  # a published experiment's figures beside these
    measured_ttft_s: Percentiles | None = None  # of a recorded run that is simulated as it was


@dataclass(frozen=True)
class WhatIfRow:
    """The trace at one choice of the varied settings, on paged memory."""

    values: tuple[str, ...]  # of each varied setting, as asked for
    num_blocks: int
    block_size: int
    scheme: SchemeResult
    is_base: bool  # the settings that were asked about


@dataclass(frozen=True)
class WhatIfResult:
    """Everything one `pagedkv simulate --what-if` found."""

    command: str
    settings: dict[str, str | int | float | bool | None]  # of the base, in order, by flag name
    trace_name: str
    trace_format: str
    num_requests: int
    num_answers: int
    prompt_tokens: int
    output_tokens: int
    num_blocks: int  # of the base, as the next two
    block_size: int
    bytes_per_token: int | None
    names: tuple[str, ...]  # of the varied settings
    rows: tuple[WhatIfRow, ...]
    remarks: tuple[str, ...]
    measured_ttft_s: Percentiles | None = None  # of a recorded run whose base is as it was

    @property
    def base(self) -> WhatIfRow:
        """The row of the settings that were asked about."""
        return next(row for row in self.rows if row.is_base)
