"""Where the memory goes: every slot accounted for at every step, weighted by the step's time.

Two records have a fixed size however long the run is. The timeline holds equal intervals: when the
run outgrows them, neighbours are merged and the interval doubles. The memory map holds snapshots:
when they are too many, every other one goes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled_in_place
from pagedkv.simulate.results import KINDS, MemoryMap, Timeline

TOKEN_STATES, RESERVED, NEVER_USED, UNUSABLE, CACHED_KIND, FREE_KIND = range(6)
"""Places of `KINDS` in the arrays below."""

_NUM_INTERVALS = 512
_NUM_SNAPSHOTS = 256
_NUM_MAP_ROWS = 160

_GOLDEN = 0.6180339887498949
"""Its multiples, without their whole part, are spread evenly over 0 to 1."""

RUNNING_COLUMN, WAITING_COLUMN, TIME_COLUMN = 6, 7, 8
"""Columns of `Observation.interval` behind the kinds: sums of running and waiting requests, each
weighted by time, and the time itself."""

INTERVAL_S, SNAPSHOT_S, NEXT_SNAPSHOT_S, BUSY_S = 0, 1, 2, 3
"""Places in `Observation.times`."""


class Observation(NamedTuple):
    """Sums over time; slots are the unit of the kinds."""

    interval: NDArray[np.float64]  # [intervals, 9], slot-seconds, request-seconds, seconds
    busy: NDArray[np.float64]  # [8], the same sums while requests wait or run
    entries: NDArray[np.float64]  # [2], block-table entries, and blocks they name, over time
    times: NDArray[np.float64]  # [4]
    snapshot_s: NDArray[np.float64]  # [snapshots]
    map_slots: NDArray[np.float64]  # [rows, 7], slots of each kind, and shared ones, being counted
    map_kind: NDArray[np.uint8]  # [rows, snapshots]
    map_shared: NDArray[np.uint8]  # [rows, snapshots]
    num_snapshots: NDArray[np.int64]  # [1]


def make_observation(*, expected_s: float, num_blocks: int) -> Observation:
    """Nothing observed yet, of a run that is expected to take `expected_s` seconds."""
    num_rows = min(num_blocks, _NUM_MAP_ROWS)
    times = np.zeros(4)
    times[INTERVAL_S] = max(expected_s, 1e-3) / (_NUM_INTERVALS / 2)
    times[SNAPSHOT_S] = max(expected_s, 1e-3) / (_NUM_SNAPSHOTS / 2)
    return Observation(
        interval=np.zeros((_NUM_INTERVALS, 9)),
        busy=np.zeros(8),
        entries=np.zeros(2),
        times=times,
        snapshot_s=np.zeros(_NUM_SNAPSHOTS),
        map_slots=np.zeros((num_rows, 7)),
        map_kind=np.zeros((num_rows, _NUM_SNAPSHOTS), dtype=np.uint8),
        map_shared=np.zeros((num_rows, _NUM_SNAPSHOTS), dtype=np.uint8),
        num_snapshots=np.zeros(1, dtype=np.int64),
    )


@compiled_in_place
def observe(
    observation: Observation,
    start_s: float,
    stop_s: float,
    slots: NDArray[np.float64],
    running: int,
    waiting: int,
) -> None:
    """From `start_s` to `stop_s` the memory held `slots` float64 [6] of each kind."""
    interval, times = observation.interval, observation.times
    while stop_s >= times[INTERVAL_S] * len(interval):
        for i in range(len(interval) // 2):
            for j in range(9):
                interval[i, j] = interval[2 * i, j] + interval[2 * i + 1, j]
        for i in range(len(interval) // 2, len(interval)):
            for j in range(9):
                interval[i, j] = 0.0
        times[INTERVAL_S] *= 2
    width = times[INTERVAL_S]
    i = int(start_s / width)
    at = start_s
    while at < stop_s:
        until = min(stop_s, (i + 1) * width)
        if until > at:
            for j in range(6):
                interval[i, j] += (until - at) * slots[j]
            interval[i, RUNNING_COLUMN] += (until - at) * running
            interval[i, WAITING_COLUMN] += (until - at) * waiting
            interval[i, TIME_COLUMN] += until - at
            at = until
        i += 1
    if running + waiting > 0:
        for j in range(6):
            observation.busy[j] += (stop_s - start_s) * slots[j]
        observation.busy[RUNNING_COLUMN] += (stop_s - start_s) * running
        observation.busy[WAITING_COLUMN] += (stop_s - start_s) * waiting
        times[BUSY_S] += stop_s - start_s


@compiled_in_place
def is_snapshot_due(observation: Observation, now_s: float) -> bool:
    """Whether the memory map lacks a snapshot at `now_s`; if so, its slot counts are emptied."""
    if now_s < observation.times[NEXT_SNAPSHOT_S]:
        return False
    for row in range(len(observation.map_slots)):
        for kind in range(7):
            observation.map_slots[row, kind] = 0.0
    return True


@compiled_in_place
def count_slots(observation: Observation, kind: int, start: int, stop: int, num_slots: int) -> None:
    """Slots `start` to `stop` (half open) of `num_slots` are of `kind`, in this snapshot.

    `kind` 6 marks slots as shared, besides what kind they are.
    """
    num_rows = len(observation.map_slots)
    row = start * num_rows // num_slots
    while start < stop:
        row_end = min(stop, ((row + 1) * num_slots + num_rows - 1) // num_rows)
        observation.map_slots[row, kind] += row_end - start
        start = row_end
        row += 1


@compiled_in_place
def take_snapshot(observation: Observation, now_s: float) -> None:
    """Add what `count_slots` counted to the memory map.

    A row of many slots shows one of their kinds, each in as many rows as its share would have: the
    most frequent one would hide all others where kinds are mixed. Which of a row's slots it is
    stays the same over time, so that the picture does not flicker.
    """
    kinds, shared, at = observation.map_kind, observation.map_shared, observation.snapshot_s
    if observation.num_snapshots[0] == len(at):
        for i in range(len(at) // 2):
            at[i] = at[2 * i]
            for row in range(len(kinds)):
                kinds[row, i] = kinds[row, 2 * i]
                shared[row, i] = shared[row, 2 * i]
        observation.num_snapshots[0] = len(at) // 2
        observation.times[SNAPSHOT_S] *= 2
    column = observation.num_snapshots[0]
    observation.num_snapshots[0] += 1
    at[column] = now_s
    for row in range(len(kinds)):
        slots = observation.map_slots[row]
        place = (row + 1) * _GOLDEN % 1.0
        wanted = place * slots[:6].sum()
        kind = 0
        passed = slots[0]
        while passed <= wanted and kind < 5:
            kind += 1
            passed += slots[kind]
        kinds[row, column] = kind
        shared[row, column] = 1 if slots[6] > place * slots[TOKEN_STATES] else 0
    width = observation.times[SNAPSHOT_S]
    observation.times[NEXT_SNAPSHOT_S] = (np.floor(now_s / width) + 1) * width


def busy_share(observation: Observation) -> dict[str, float]:
    """Share of the memory that each kind had while requests waited or ran; sums to 1."""
    total = observation.busy[:6].sum()
    if total == 0:
        return {kind: float(kind == "free") for kind in KINDS}
    return {kind: float(observation.busy[i] / total) for i, kind in enumerate(KINDS)}


def timeline(observation: Observation) -> Timeline:
    """The intervals in which anything happened."""
    seen = np.flatnonzero(observation.interval[:, TIME_COLUMN] > 0)
    rows = observation.interval[seen]
    duration = rows[:, TIME_COLUMN]
    width = observation.times[INTERVAL_S]
    return Timeline(
        start_s=seen * width,
        end_s=seen * width + duration,
        share=rows[:, :6] / rows[:, :6].sum(axis=1, keepdims=True),
        running=rows[:, RUNNING_COLUMN] / duration,
        waiting=rows[:, WAITING_COLUMN] / duration,
    )


def memory_map(observation: Observation, *, num_slots: int) -> MemoryMap:
    """The snapshots taken, oldest first."""
    n = int(observation.num_snapshots[0])
    return MemoryMap(
        time_s=observation.snapshot_s[:n].copy(),
        kind=observation.map_kind[:, :n].copy(),
        shared=observation.map_shared[:, :n].copy(),
        slots_per_row=num_slots / len(observation.map_kind),
    )
