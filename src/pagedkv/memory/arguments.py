"""What callers give, as compiled code takes it.

Compiled code is made anew for every other kind of argument, and believes what it is told.
"""

from __future__ import annotations

import operator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv.errors import InvalidInput

MAX_BLOCKS = 2**31 - 2
MAX_BLOCK_SIZE = 2**20
MAX_TOKENS = 2**62
"""What a caller may ask for; of these numbers compiled code can make sums."""

_INT64_MAX = 2**63 - 1


def as_integers(name: str, values: ArrayLike) -> NDArray[np.int64]:
    """`values` as int64 [n], contiguous and writable. An array that is so comes back itself.

    Raises `InvalidInput` for anything but integers in one dimension.
    """
    try:
        array = np.asarray(values)
    except ValueError:  # some are lists
        raise InvalidInput(f"{name} are not all integers: give one list of integers") from None
    if array.dtype != np.int64:
        if array.dtype.kind not in "iu" and array.size:
            raise InvalidInput(f"{name} are {array.dtype}: give integers")
        if array.dtype == np.uint64 and array.size and int(array.max()) > _INT64_MAX:
            raise InvalidInput(f"{name} go up to {array.max()}: give at most {_INT64_MAX}")
        array = array.astype(np.int64)
    if array.ndim != 1:
        raise InvalidInput(f"{name} have shape {array.shape}: give one dimension")
    return array if array.flags.carray else array.copy()


def as_keys(block_keys: ArrayLike) -> NDArray[np.uint64]:
    """`block_keys` as compiled code takes them; the caller checks the shape."""
    try:
        keys = np.asarray(block_keys)
    except ValueError:  # some are lists
        raise InvalidInput("block_keys are not pairs of integers: give [k, 2]") from None
    if keys.dtype != np.uint64:
        if keys.dtype.kind not in "iu" and keys.size:
            raise InvalidInput(f"block_keys are {keys.dtype}: give uint64")
        if keys.size and keys.min() < 0:
            raise InvalidInput(f"block_keys hold {keys.min()}: give uint64")
        keys = keys.astype(np.uint64)
    if keys.size == 0:
        keys = keys.reshape(0, 2)
    return keys if keys.flags.carray else keys.copy()


def as_secret(given: object) -> bytes:
    """The 16 bytes that key a hash."""
    if not isinstance(given, bytes) or len(given) != 16:
        size = f"{len(given)} bytes" if isinstance(given, bytes) else type(given).__name__
        raise InvalidInput(f"secret is {size}: give 16 bytes")
    return given


def as_integer(name: str, value: int) -> int:
    """`value` as a Python int: NumPy's integers would each be compiled for anew."""
    if type(value) is int:  # so a bool, which is an int too, is looked at more closely
        return value
    try:
        if not isinstance(value, bool):
            return int(operator.index(value))
    except TypeError:
        pass
    raise InvalidInput(f"{name} is {value!r}: give an integer")


def as_count(name: str, value: int, least: int, most: int) -> int:
    """`value` as a Python int within bounds, both included."""
    number = as_integer(name, value)
    if not least <= number <= most:
        raise InvalidInput(f"{name} is {number}: give {least} to {most}")
    return number
