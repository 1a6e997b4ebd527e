"""Arrays of others, taken as they are: NumPy's, torch's, anything with `__array__`.

Kernels see every array as one flat run of numbers and the strides of its axes, so that a view
with heads before tokens, or a slice of a fused projection, is read in place. Half precision
arrives as its bits, uint16, since NumPy has no bfloat16.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from pagedkv.errors import InvalidInput

_INT32_MAX, _INT64_MAX = 2**31 - 1, 2**63 - 1

_ALIGNMENT_BYTES = 64
"""A line of the CPU's cache: a vector that lies across two is read twice."""


class Flat(NamedTuple):
    """An array [tokens, heads, dim] as kernels take it."""

    numbers: NDArray[Any]
    """float32, or the bits of half precision as uint16, one dimension."""
    token_stride: int
    """From one token to the next, in numbers."""
    head_stride: int


def native(array: Any, name: str) -> tuple[NDArray[Any], str]:
    """NumPy's view of `array` and the name of its dtype; bfloat16 comes as uint16.

    Nothing is copied. A torch tensor must be in the CPU's memory.
    """
    if isinstance(array, np.ndarray):
        dtype = _name_of(array.dtype)
        # ml_dtypes registers a bfloat16 with NumPy that Numba does not know.
        return (array.view(np.uint16) if dtype == "bfloat16" else array), dtype
    if hasattr(array, "detach") and hasattr(array, "dtype"):
        dtype = _name_of(array.dtype)
        try:
            tensor = array.detach()
            if dtype == "bfloat16":
                # The module that made it is loaded already; importing it is not ours to do.
                int16 = sys.modules[type(tensor).__module__.partition(".")[0]].int16
                return tensor.view(int16).numpy().view(np.uint16), dtype
            return tensor.numpy(), dtype
        except (TypeError, RuntimeError, KeyError, AttributeError) as problem:
            raise InvalidInput(
                f"{name} cannot be read where it lies ({problem}): give a tensor in CPU memory"
            ) from problem
    try:
        made = np.asarray(array)
    except ValueError:  # what it holds differs in shape
        raise InvalidInput(f"{name} is no array: its rows are not of one length") from None
    return made, made.dtype.name


@functools.cache
def _name_of(dtype: Any) -> str:
    """float32 for NumPy's and for torch's; to ask either takes microseconds."""
    if isinstance(dtype, np.dtype):
        # What has its bytes the other way round is not what its name says.
        return dtype.name if dtype.isnative else dtype.str
    return str(dtype).rpartition(".")[2]


def name_of_dtype(dtype: Any) -> str:
    """The name of a dtype that is given as its name, as NumPy's or as torch's."""
    if isinstance(dtype, str):
        return dtype
    return _name_of(np.dtype(dtype) if isinstance(dtype, type) else dtype)


def flat(array: NDArray[Any]) -> Flat:
    """`array` [tokens, heads, dim], whose last axis is contiguous, as kernels take it."""
    if array.dtype == np.float16:
        array = array.view(np.uint16)
    tokens, heads, dim = array.shape
    if array.flags.c_contiguous:
        return Flat(array.reshape(-1), heads * dim, dim)
    token_stride, head_stride, _ = (stride // array.itemsize for stride in array.strides)
    span = (tokens - 1) * token_stride + (heads - 1) * head_stride + dim
    return Flat(
        as_strided(array, (span,), (array.itemsize,)),
        token_stride,
        head_stride,
    )


def is_readable_in_place(array: NDArray[Any]) -> bool:
    """Whether `flat` can describe [tokens, heads, dim] without a copy.

    Compiled code is made for arrays that may be written; for others it would be made again.
    """
    if not array.size:
        return True
    token_stride, head_stride, stride = array.strides
    return (
        array.flags.writeable
        and (stride == array.itemsize or array.shape[2] == 1)
        and token_stride >= 0 <= head_stride
    )


def integers(array: Any, name: str, *, ndim: int = 1) -> NDArray[np.int64]:
    """`array` as a contiguous array of int64, without a copy where it is one.

    An empty one may be of any dtype, as `[]` is of floats.
    """
    numbers = _whole_numbers(array, name)
    if not numbers.size and numbers.ndim < ndim:
        numbers = numbers.reshape((0,) * ndim)
    if numbers.ndim != ndim:
        raise InvalidInput(
            f"{name} has shape {list(numbers.shape)}: give [{'n, 2' if ndim == 2 else 'n'}]"
        )
    if numbers.dtype == np.uint64 and numbers.size and int(numbers.max()) > _INT64_MAX:
        raise InvalidInput(f"{name} go up to {numbers.max()}: give at most {_INT64_MAX}")
    return _for_compiled(numbers, np.int64)


def block_ids(array: Any, name: str) -> NDArray[np.int32]:
    """`array` as a contiguous array of int32, without a copy where it is one.

    What is too large for one becomes -1, which is no block either: a table may hold anything
    where nobody looks, and where somebody does it is refused.
    """
    numbers = _whole_numbers(array, name)
    if numbers.dtype != np.int32 and not np.can_cast(numbers.dtype, np.int32):
        wide = numbers.astype(np.int64)  # more than that holds is below 0 then
        numbers = np.where((wide >= 0) & (wide <= _INT32_MAX), wide, -1)
    return _for_compiled(numbers, np.int32)


def _whole_numbers(array: Any, name: str) -> NDArray[Any]:
    numbers, _ = native(array, name)
    if numbers.dtype.kind not in "iu" and numbers.size:
        raise InvalidInput(f"{name} must be integers, not {numbers.dtype.name}")
    return numbers


def _for_compiled(numbers: NDArray[Any], dtype: Any) -> NDArray[Any]:
    numbers = np.ascontiguousarray(numbers, dtype=dtype)
    # Compiled code is made for arrays that may be written; for others it would be made again.
    return numbers if numbers.flags.writeable else numbers.copy()


def aligned(size: int, dtype: Any) -> NDArray[Any]:
    """`size` numbers that begin with a line of the cache, and hold anything.

    Raises `MemoryError` or `ValueError` for more than there is, or than can be counted.
    """
    nbytes = size * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + _ALIGNMENT_BYTES, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    numbers: NDArray[Any] = raw[start : start + nbytes].view(dtype)
    return numbers


def batch_arrays(
    block_tables: Any, lengths: Any, query_starts: Any
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """The three that say what a batch is: block tables int32 [sequences, width], lengths int64
    [sequences], query starts int64 [sequences + 1].

    Raises `InvalidInput` where the first two do not belong together. What stands in them, and
    whether the starts fit, is checked with the work that is made of them.
    """
    tables = block_ids(block_tables, "block_tables")
    numbers = integers(lengths, "lengths")
    starts = integers(query_starts, "query_starts")
    if not tables.size and not len(numbers):
        tables = tables.reshape(0, 0)
    if tables.ndim != 2 or len(tables) != len(numbers):
        raise InvalidInput(
            f"block_tables {list(tables.shape)} must be [sequences, width], a row for "
            f"each of {len(numbers)} lengths"
        )
    return tables, numbers, starts
