"""Keys and values in the blocks: one page a block, all layers in it.

::

    page of one block   [ layer 0: K | V ][ layer 1: K | V ] ...
    K of one layer      [ kv head ][ token of the block ][ key_dim ]
    V of one layer      [ kv head ][ token of the block ][ value_dim ]

So the keys of one head in one block are one contiguous run, and a block is copied, swapped or
stored as one. Layers may differ in heads and in size; each has its place in the page.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.attention.arrays import integers, name_of_dtype
from pagedkv.errors import InvalidInput

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The dtypes that a storage may hold, and the bytes of a number."""


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps of each token."""

    num_kv_heads: int
    key_dim: int
    """Numbers in a key; a multiple of 8."""
    value_dim: int
    """Numbers in a value; a multiple of 8, and not always `key_dim`."""

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "key_dim", "value_dim"):
            object.__setattr__(self, name, integer(name, getattr(self, name)))
        if self.num_kv_heads < 1:
            raise InvalidInput(f"a layer needs at least 1 KV head, not {self.num_kv_heads}")
        for name, dim in (("key_dim", self.key_dim), ("value_dim", self.value_dim)):
            if dim < 8 or dim % 8:
                raise InvalidInput(f"{name} must be a multiple of 8, not {dim}")

    @property
    def numbers_per_token(self) -> int:
        """Numbers of one token, keys and values of all heads."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class Pages:
    """What a storage is like, wherever its memory is: the layout of its pages."""

    def __init__(
        self, num_blocks: int, block_size: int, layers: Sequence[LayerShape], dtype: Any
    ) -> None:
        num_blocks = integer("num_blocks", num_blocks)
        block_size = integer("block_size", block_size)
        if num_blocks < 1 or block_size < 1:
            raise InvalidInput(
                f"{num_blocks} blocks of {block_size} tokens hold nothing: give at least 1 and 1"
            )
        try:
            self.layers = tuple(layers)
        except TypeError:
            raise InvalidInput(f"layers is {layers!r}: give a list, a shape a layer") from None
        if not self.layers:
            raise InvalidInput("a storage without layers holds nothing: give at least one shape")
        for i, shape in enumerate(self.layers):
            if not isinstance(shape, LayerShape):
                raise InvalidInput(f"layers[{i}] is {shape!r}: give a LayerShape")
        self.dtype = name_of_dtype(dtype)
        if self.dtype not in ITEM_BYTES:
            raise InvalidInput(f"unknown dtype {dtype!r}: choose from {', '.join(ITEM_BYTES)}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._dtypes_taken = "float32" if self.dtype == "float32" else f"{self.dtype} or float32"
        sizes = [shape.numbers_per_token * block_size for shape in self.layers]
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._page_numbers = sum(sizes)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block."""
        return self._page_numbers * ITEM_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers."""
        return self.page_bytes // self.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.page_bytes

    def _shape(self, layer: int) -> LayerShape:
        if type(layer) is not int:  # asked for each layer at each step: the usual is quick
            layer = integer("layer", layer)
        if not 0 <= layer < len(self.layers):
            raise InvalidInput(f"there is no layer {layer}: this storage has {len(self.layers)}")
        return self.layers[layer]

    def _places(self, layer: int) -> tuple[int, int]:
        """Where a layer's keys and values begin in a page."""
        shape, start = self.layers[layer], self._starts[layer]
        return start, start + shape.num_kv_heads * self.block_size * shape.key_dim

    def _pairs(self, copies: Any) -> list[list[int]]:
        """`copies` [n, 2], whose blocks there are."""
        pairs = integers(copies, "copies", ndim=2)
        if pairs.size and pairs.shape[1] != 2:
            raise InvalidInput(f"copies {list(pairs.shape)} must be [n, 2], as (from, to)")
        if pairs.size and not 0 <= pairs.min() <= pairs.max() < self.num_blocks:
            raise InvalidInput(f"copies name blocks outside 0 to {self.num_blocks - 1}")
        listed: list[list[int]] = pairs.tolist()
        return listed

    def _tokens(self, block_table: Any, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The block of each of a sequence's first `length` tokens, and its offset in it."""
        table = integers(block_table, "block_table")
        length = integer("length", length)
        if not 0 <= length <= len(table) * self.block_size:
            raise InvalidInput(
                f"length must be 0 to {len(table) * self.block_size}, which a block_table of "
                f"{len(table)} entries holds, not {length}"
            )
        tokens = np.arange(length)
        blocks = table[tokens // self.block_size]
        if length and not 0 <= blocks.min() <= blocks.max() < self.num_blocks:
            raise InvalidInput(f"block_table names blocks outside 0 to {self.num_blocks - 1}")
        return blocks, tokens % self.block_size


def integer(name: str, value: Any) -> int:
    """`value` as an int, be it NumPy's; a bool is none."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise InvalidInput(f"{name} is {value!r}: give an integer")


def check_plan(plan: Any, made_for: object) -> None:
    """Raise `InvalidInput` for what is no plan, or was made for other blocks: these are not read
    as far as it says."""
    if getattr(plan, "made_for", None) is not made_for:
        what = "made by another storage" if hasattr(plan, "made_for") else type(plan).__name__
        raise InvalidInput(f"plan is {what}: give what `plan` of this storage returned")


def check_options(
    scale: float | None, window: int | None, chunk: int | None, soft_cap: float | None
) -> None:
    """Raise `InvalidInput` for options of `attend` that no batch could have."""
    if scale is not None:
        _check_number("scale", scale)
    if window is not None:
        _check_reach("window", window)
    if chunk is not None:
        _check_reach("chunk", chunk)
    if soft_cap is not None:
        _check_number("soft_cap", soft_cap)
        if not soft_cap > 0:
            raise InvalidInput(f"soft_cap must be above 0, not {soft_cap}")


def check_sinks(scores: NDArray[Any]) -> None:
    """Raise `InvalidInput` for what are no scores, or would make every result a NaN."""
    if scores.dtype.kind not in "fiu":
        raise InvalidInput(f"sinks are {scores.dtype.name}: give floats")
    if scores.size and not scores.max() < np.inf:
        raise InvalidInput("sinks hold inf or a NaN: give finite scores, or -inf for no sink")


_FARTHEST = 2**63 - 1
_LARGEST = 1e38
"""What float32 still holds when scores become powers of two."""


def _check_reach(name: str, given: int) -> None:
    if type(given) is not int:
        given = integer(name, given)
    if given < 1:
        raise InvalidInput(f"{name} must be at least 1 token, not {given}")
    if given > _FARTHEST:
        raise InvalidInput(f"{name} must be at most {_FARTHEST} tokens, not {given}: give None")


def _check_number(name: str, given: float) -> None:
    try:
        if -_LARGEST < given < _LARGEST:  # which a NaN is not
            return
    except (TypeError, ValueError):  # no number; several
        pass
    raise InvalidInput(f"{name} is {given!r}: give a number below {_LARGEST:.0e}")
