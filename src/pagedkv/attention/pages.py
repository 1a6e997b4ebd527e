"""Keys and values in the blocks: one page a block, all layers in it.

::

    page of one block   [ layer 0: K | V ][ layer 1: K | V ] ...
    K of one layer      [ kv head ][ token of the block ][ key_dim ]
    V of one layer      [ kv head ][ token of the block ][ value_dim ]

So the keys of one head in one block are one contiguous run, and a block is copied, swapped or
stored as one. Layers may differ in heads and in size; each has its place in the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        self, num_blocks: int, block_size: int, layers: Sequence[LayerShape], dtype: str
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise InvalidInput(
                f"{num_blocks} blocks of {block_size} tokens hold nothing: give at least 1 and 1"
            )
        if not layers:
            raise InvalidInput("a storage without layers holds nothing: give at least one shape")
        if dtype not in ITEM_BYTES:
            raise InvalidInput(f"unknown dtype {dtype!r}: choose from {', '.join(ITEM_BYTES)}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = tuple(layers)
        self.dtype = dtype
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
        if not 0 <= layer < len(self.layers):
            raise InvalidInput(f"there is no layer {layer}: this storage has {len(self.layers)}")
        return self.layers[layer]

    def _places(self, layer: int) -> tuple[int, int]:
        """Where a layer's keys and values begin in a page."""
        shape, start = self.layers[layer], self._starts[layer]
        return start, start + shape.num_kv_heads * self.block_size * shape.key_dim


def check_options(window: int | None, chunk: int | None, soft_cap: float | None) -> None:
    """Raise `InvalidInput` for options of `attend` that no batch could have."""
    for name, given in (("window", window), ("chunk", chunk)):
        if given is not None and given < 1:
            raise InvalidInput(f"{name} must be at least 1 token, not {given}")
    if soft_cap is not None and not soft_cap > 0:
        raise InvalidInput(f"soft_cap must be above 0, not {soft_cap}")
