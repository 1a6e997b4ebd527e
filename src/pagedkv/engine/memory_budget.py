"""How many blocks a model gets, and what they are worth."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pagedkv.attention import LayerShape
from pagedkv.attention.pages import ITEM_BYTES
from pagedkv.errors import InvalidInput
from pagedkv.memory.block_table import blocks_for

DEFAULT_KV_MEMORY = "1GiB"

AUTO = "auto"
"""As much as is left: measured, see `measuring`."""

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


@dataclass(frozen=True)
class MemoryBudget:
    """The blocks of an engine, and their size."""

    num_blocks: int
    block_size: int
    block_bytes: int
    max_model_len: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that all blocks hold."""
        return self.num_blocks * self.block_size

    @property
    def full_sequences(self) -> float:
        """Sequences of the model's full length that fit at once, counted in blocks."""
        return self.num_blocks / blocks_for(self.max_model_len, self.block_size)

    def __str__(self) -> str:
        """What the memory is worth, in one line."""
        return (
            f"KV memory {format_bytes(self.num_bytes)}: {self.num_blocks:,} blocks of "
            f"{self.block_size} tokens, {self.num_tokens:,} tokens, {self.full_sequences:,.1f} "
            f"sequences of the full {self.max_model_len:,} tokens"
        )


def plan_memory(
    shapes: Sequence[LayerShape],
    *,
    dtype: str,
    block_size: int,
    max_model_len: int,
    kv_memory: int | str | None = None,
    num_blocks: int | None = None,
    num_tokens: int | None = None,
) -> MemoryBudget:
    """The budget for layers of `shapes`; at most one of the three sizes is given.

    `kv_memory` is in bytes, or text like `"2GiB"`; the blocks are what fits in it whole.
    `num_tokens` is rounded up to whole blocks.

    Raises `InvalidInput` for several sizes, or for less than a block.
    """
    check_sizes(
        block_size=block_size, kv_memory=kv_memory, num_blocks=num_blocks, num_tokens=num_tokens
    )
    block_bytes = sum(s.numbers_per_token for s in shapes) * block_size * ITEM_BYTES[dtype]
    if num_tokens is not None:
        num_blocks = blocks_for(num_tokens, block_size)
    if num_blocks is None:
        wanted = DEFAULT_KV_MEMORY if kv_memory is None else kv_memory
        num_blocks = parse_bytes(wanted) // block_bytes
        if num_blocks < 1:
            raise InvalidInput(
                f"kv_memory {wanted} is less than a block: {block_size} tokens of this model take "
                f"{format_bytes(block_bytes)}"
            )
    return MemoryBudget(num_blocks, block_size, block_bytes, max_model_len)


def check_sizes(
    *,
    block_size: int,
    kv_memory: int | str | None = None,
    num_blocks: int | None = None,
    num_tokens: int | None = None,
) -> None:
    """Raise `InvalidInput` for sizes that are wrong whatever the model is: several, or no size."""
    sizes = {"kv_memory": kv_memory, "num_blocks": num_blocks, "num_tokens": num_tokens}
    given = [name for name, value in sizes.items() if value is not None]
    if len(given) > 1:
        raise InvalidInput(f"{' and '.join(given)} both say how much memory: give one of them")
    for name in ("num_blocks", "num_tokens"):
        value = sizes[name]
        if value is not None and (not isinstance(value, int) or value < 1):
            raise InvalidInput(f"{name} is {value!r}: give at least 1")
    if block_size < 1:
        raise InvalidInput(f"block_size is {block_size}: give at least 1")
    if kv_memory is not None and kv_memory != AUTO:
        parse_bytes(kv_memory)


def parse_bytes(size: int | str) -> int:
    """Bytes from a number or text with a unit.

    >>> parse_bytes("2GiB"), parse_bytes("1.5 GB"), parse_bytes(4096)
    (2147483648, 1500000000, 4096)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    if match is None or match[2].upper() not in _UNITS:
        raise InvalidInput(f"kv_memory {size!r} is no size: write it like 2GiB, or auto")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def format_bytes(num_bytes: int) -> str:
    """A size as people read it.

    >>> format_bytes(2147483648), format_bytes(500)
    ('2.0 GiB', '500 B')
    """
    size = float(num_bytes)
    units = iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
