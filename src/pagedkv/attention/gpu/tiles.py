"""How much of queries, keys and values a program holds at once, by what a layer is like.

Few rows want many small programs, so that enough of the memory is being read at any time; many
rows want large tiles, so that what is read once is used often. A device's registers and shared
memory bound both: some 227 KiB of the latter on each processor of an H100 or H200.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from pagedkv.errors import InvalidInput

FEWEST_ROWS = 16
"""The fewest that a matrix unit takes."""


class Tile(NamedTuple):
    """The shape of a program, and what it asks of the compiler."""

    rows: int
    """Rows a program computes together."""
    tokens: int
    """Tokens of one turn of its loop."""
    num_warps: int
    num_stages: int
    """Turns of the loop whose keys and values are being read at a time."""
    programs_each: int
    """Programs that one processor of the device holds at a time."""


class LayerKind(NamedTuple):
    """What the pieces of a batch depend on, besides the batch: layers alike in it share them."""

    num_kv_heads: int
    heads_each: int
    key_dim: int
    value_dim: int
    window: int
    """0 where there is none, as for `chunk`."""
    chunk: int
    is_half: bool
    """Whether queries are float16 or bfloat16."""


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size` and 16.

    >>> power_of_two(8), power_of_two(80), power_of_two(128)
    (16, 128, 128)
    """
    return max(16, 1 << (size - 1).bit_length())


def tiles_for(kind: LayerKind, shared_bytes: int) -> tuple[Tile, ...]:
    """Ascending in rows; a sequence takes the first that holds all its rows, or else the last.

    `shared_bytes` of memory are what a program may share at most. Raises `InvalidInput` where the
    smallest tile needs more.
    """
    dim = power_of_two(max(kind.key_dim, kind.value_dim))
    chosen = _tiles(dim, kind.is_half, shared_bytes >= _LARGE_BYTES)
    fitting = tuple(t for t in chosen if held_bytes(t, dim, kind.is_half) <= shared_bytes)
    if not fitting:
        needed = held_bytes(chosen[0], dim, kind.is_half) // 1024
        raise InvalidInput(
            f"heads of {max(kind.key_dim, kind.value_dim)} numbers in "
            f"{'half precision' if kind.is_half else 'float32'} need {needed} KiB of a "
            f"processor's memory, and this device has {shared_bytes // 1024} KiB: "
            + ("use another device" if kind.is_half else "load the model in bfloat16 or float16")
        )
    return fitting


def held_bytes(tile: Tile, dim: int, is_half: bool) -> int:
    """What a program of `tile` shares at least: its queries, and the keys and values of the turns
    that are being read, or else of the one of both that is being multiplied."""
    turns = max(1, (tile.num_stages - 1) // 2)
    read = 2 * turns * tile.tokens if is_half else tile.tokens
    return (tile.rows + read) * dim * (2 if is_half else 4) + _BESIDE_BYTES


_BESIDE_BYTES = 2048
"""For what rows hand to one another, and block tables."""

_LARGE_BYTES = 162 * 1024
"""Data-centre devices since the A100 have at least so much, others some 100 KiB."""


@functools.cache
def _tiles(dim: int, is_half: bool, is_large: bool) -> tuple[Tile, ...]:
    """For keys and values of up to `dim` numbers, a power of two."""
    if not is_half:
        # To check with, not to be quick: the matrix units have no exact float32.
        tokens = 32 if dim <= 128 else 16
        return Tile(FEWEST_ROWS, tokens, 4, 1, 2), Tile(32, tokens, 8, 1, 1)
    if dim > 256:
        return Tile(FEWEST_ROWS, 16, 4, 3, 1), Tile(32, 16, 8, 3, 1)
    # A turn needs the block table's entries before its keys and values, and the compiler gives
    # each of the two half of the stages: with 5, two turns are being read while one is computed.
    # 16 KiB of keys and as much of values a turn, so that three programs of few rows fit a
    # processor, by their registers too.
    tokens = max(16, min(128, 8192 // dim))
    if not is_large:
        return Tile(FEWEST_ROWS, tokens, 4, 3, 2), Tile(64, min(tokens, 64) // 2, 4, 3, 1)
    # Twice the tokens a turn take a quarter fewer instructions for each; registers just suffice.
    many = Tile(128, 32, 8, 5, 1) if dim > 128 else Tile(128, 128, 8, 3, 1)
    return Tile(FEWEST_ROWS, tokens, 4, 5, 3), Tile(64, min(tokens, 64), 4, 3, 2), many
