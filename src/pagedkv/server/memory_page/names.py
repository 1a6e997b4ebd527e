"""Names of sequences: numbers in the order of coming, none of which is given twice.

A column of the scheduler belongs to one sequence after another. Its generation tells them apart.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled_inline


class Names(NamedTuple):
    """Who was named last in each column."""

    name: NDArray[np.int32]  # [num_columns]
    generation: NDArray[np.int64]  # [num_columns], -1 where nobody was named
    num_given: NDArray[np.int64]  # [1]


def make_names() -> Names:
    """Nobody is named, and there is room for no column."""
    return Names(
        np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
    )


def with_room(names: Names, num_columns: int) -> Names:
    """The same names, for at least as many columns as there were."""
    missing = num_columns - len(names.name)
    return Names(
        np.concatenate([names.name, np.zeros(missing, dtype=np.int32)]),
        np.concatenate([names.generation, np.full(missing, -1)]),
        names.num_given,
    )


@compiled_inline
def name_of(names: Names, column: int, generation: int) -> int:
    """The name of who has or had `column` in that generation, which no earlier call was after."""
    if names.generation[column] != generation:
        names.num_given[0] += 1
        names.name[column] = names.num_given[0]
        names.generation[column] = generation
    return int(names.name[column])
