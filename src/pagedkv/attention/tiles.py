"""Products of bfloat16 matrices in the tile registers that some CPUs have (Intel's AMX).

A tile is 16 rows of 64 bytes. One instruction multiplies a tile of 16 rows of 32 numbers with one
of 32 rows of 16, and adds that to 16 x 16 floats: more than ten times what vectors of floats do in
the same time. The second operand lies in *pairs*: two rows are one row of pairs of numbers.

Queries lie in lanes here as they do for vectors, so scores are `keys x queries`, and outputs
`values turned x weights`. Arrays are flat; numbers of bfloat16 are their bits, uint16.

Each function has two forms with one meaning, as in `vectors`.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import config
from numba.extending import intrinsic
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from pagedkv.attention.arguments import WIDTH
from pagedkv.attention.vector_code import BFLOAT16, HOST_LANES, INT, LANE_VECTORS, VectorCode

TILE_ROWS = 16

STEP = 32
"""Numbers in a row of a tile, and rows of two: what sizes must be a multiple of."""

_REQUEST_STATE = 158, 0x1023, 18
"""Linux on x86-64: the system call `arch_prctl`, its "may I use", and the state of the tiles."""


@functools.cache
def have_tiles() -> bool:
    """Whether this CPU has the tiles, and the system lets this process use them."""
    features = llvm.get_host_cpu_features()
    if not (features.get("amx-bf16") and features.get("amx-tile") and features.get("avx512bw")):
        return False
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    refusal: int = ctypes.CDLL(None).syscall(*map(ctypes.c_long, _REQUEST_STATE))
    return refusal == 0


def fits_tiles(half: int, half_queries: bool, key_dim: int, value_dim: int, factor: float) -> bool:
    """Whether many queries go to the tiles: where there are any, everything is bfloat16 and whole.

    Uncompiled they always do, for their NumPy forms to be run.
    """
    return (
        half == BFLOAT16
        and half_queries
        and key_dim % STEP == value_dim % STEP == 0
        and factor > 0
        and (config.DISABLE_JIT or have_tiles())
    )


if config.DISABLE_JIT:

    def begin_tiles() -> None:
        pass

    def end_tiles() -> None:
        pass

    def copy_numbers(
        source: NDArray[np.uint16], s: int, target: NDArray[np.uint16], t: int, DIM: int
    ) -> None:
        target[t : t + DIM] = source[s : s + DIM]

    def turn_pairs(rows: NDArray[np.uint16], panel: NDArray[np.uint16], at: int, DIM: int) -> None:
        pairs = rows[: TILE_ROWS * DIM].reshape(TILE_ROWS, -1, 2)
        _lanes(panel, at, 2 * TILE_ROWS, DIM // 2)[:] = pairs.transpose(1, 0, 2).reshape(
            DIM // 2, -1
        )

    def turn_rows(
        rows: NDArray[np.uint16], turned: NDArray[np.uint16], ROWS: int, DIM: int
    ) -> None:
        turned[:] = rows.reshape(ROWS, DIM).T.ravel()

    def score_tiles(
        keys: NDArray[np.uint16],
        q: NDArray[np.uint16],
        at: int,
        scores: NDArray[np.float32],
        count: int,
        DIM: int,
    ) -> None:
        panel = _from_pairs(q[at : at + DIM * WIDTH])
        with np.errstate(invalid="ignore", over="ignore"):  # rows behind the last hold anything
            product = _floats(keys).reshape(-1, DIM)[:count] @ panel
        scores[: count * WIDTH] = product.ravel()

    def soften_pairs(
        scores: NDArray[np.float32],
        count: int,
        factor: float,
        tops: NDArray[np.float32],
        sums: NDArray[np.float32],
        at: int,
        fading: NDArray[np.float32],
        weights: NDArray[np.uint16],
    ) -> None:
        part = scores[: count * WIDTH].reshape(count, WIDTH) * np.float32(factor)
        lanes = slice(at, at + WIDTH)
        top = np.maximum(tops[lanes], part.max(0))
        power = np.exp2(part - top)
        fading[:] = np.exp2(tops[lanes] - top)
        sums[lanes] = sums[lanes] * fading + power.sum(0)
        tops[lanes] = top
        bits = power.view(np.uint32)
        halves = ((bits + 0x8000) >> 16).astype(np.uint16)
        weights[: count * WIDTH] = halves.reshape(count // 2, 2, WIDTH).transpose(0, 2, 1).ravel()

    def value_tiles(
        weights: NDArray[np.uint16],
        turned: NDArray[np.uint16],
        count: int,
        fading: NDArray[np.float32],
        out: NDArray[np.float32],
        at: int,
        ROWS: int,
        DIM: int,
    ) -> None:
        sums = out[at : at + DIM * WIDTH].reshape(DIM, WIDTH)
        sums *= fading
        values = _floats(turned).reshape(DIM, ROWS)[:, :count]
        sums += values @ _from_pairs(weights[: count * WIDTH])

    def _lanes(panel: NDArray[Any], at: int, width: int, count: int) -> NDArray[Any]:
        """`width` numbers of each of `count` rows of pairs, the first of them at `at`."""
        rows = as_strided(panel[at:], (count, width), (2 * WIDTH * 2, 2))
        return rows

    def _floats(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
        return (bits.astype(np.uint32) << 16).view(np.float32)

    def _from_pairs(pairs: NDArray[np.uint16]) -> NDArray[np.float32]:
        """[rows, WIDTH] floats of rows that lie in pairs."""
        return _floats(pairs).reshape(-1, WIDTH, 2).transpose(0, 2, 1).reshape(-1, WIDTH)

else:

    def _emitted(definition: Callable[..., Any]) -> Any:
        return intrinsic(prefer_literal=True)(definition)

    def _constant(argument: Any) -> int:
        return int(argument.literal_value)

    class _TileCode(VectorCode):
        """Vector code with tiles: eight of them, all of 16 rows of 64 bytes."""

        def tile(self, name: str, *arguments: Any) -> None:
            """LLVM's intrinsic for the tile instruction `name`."""
            module, of = self.builder.module, [argument.type for argument in arguments]
            name = f"llvm.x86.{name}"
            function = module.globals.get(name) or ir.Function(
                module, ir.FunctionType(ir.VoidType(), of), name
            )
            self.builder.call(function, arguments)

        def load_tile(self, tile: int, address: Any, pitch_bytes: int) -> None:
            self.tile("tileloadd64", _BYTE(tile), self._bytes(address), INT(pitch_bytes))

        def store_tile(self, tile: int, address: Any, pitch_bytes: int) -> None:
            self.tile("tilestored64", _BYTE(tile), self._bytes(address), INT(pitch_bytes))

        def clear_tile(self, tile: int) -> None:
            self.tile("tilezero", _BYTE(tile))

        def multiply_tiles(self) -> None:
            """Tiles 0 to 3, two by two, += tiles 4 and 5, below each other, x 6 and 7."""
            for i in range(4):
                self.tile("tdpbf16ps", _BYTE(i), _BYTE(4 + i // 2), _BYTE(6 + i % 2))

        def shape_tiles(self) -> None:
            b = self.builder
            room = b.alloca(ir.ArrayType(_BYTE, 64))
            room.align = 64
            shape = [1] + [0] * 15 + [64, 0] * 8 + [0] * 16 + [16] * 8 + [0] * 8
            b.store(ir.Constant(ir.ArrayType(_BYTE, 64), shape), room)
            self.tile("ldtilecfg", self._bytes(room))

        def _bytes(self, address: Any) -> Any:
            return self.builder.bitcast(address, _BYTE.as_pointer())

    _BYTE = ir.IntType(8)
    _NONE = ir.IntType(HOST_LANES)(0)
    _WORDS = ir.VectorType(ir.IntType(32), 16)

    def _turned(code: VectorCode, vectors: list[Any]) -> list[Any]:
        """The transpose of 16 vectors of 16 words."""
        for span in (8, 4, 2, 1):
            low = [i if not i & span else 16 + i - span for i in range(16)]
            high = [i + span if not i & span else 16 + i for i in range(16)]
            new = list(vectors)
            for i in range(16):
                if not i & span:
                    a, b = vectors[i], vectors[i + span]
                    new[i], new[i + span] = code.shuffle(a, b, low), code.shuffle(a, b, high)
            vectors = new
        return vectors

    def _load_words(code: VectorCode, address: Any) -> Any:
        b = code.builder
        return b.load(b.bitcast(address, _WORDS.as_pointer()), align=2)

    def _store_words(code: VectorCode, vector: Any, address: Any) -> None:
        b = code.builder
        b.store(vector, b.bitcast(address, _WORDS.as_pointer()), align=2)

    @_emitted
    def begin_tiles(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _TileCode(context, builder, signature, arguments).shape_tiles()
            return context.get_dummy_value()

        return types.void(), generate

    @_emitted
    def copy_numbers(
        typing_context: Any, source: Any, s: Any, target: Any, t: Any, DIM: Any
    ) -> Any:
        """`target[t:t+DIM] = source[s:s+DIM]`."""
        dim = _constant(DIM)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = _TileCode(context, builder, signature, arguments)
            for d in range(0, dim, STEP):
                words = _load_words(code, code.pointer(0, arguments[1], d))
                _store_words(code, words, code.pointer(2, arguments[3], d))
            return context.get_dummy_value()

        return types.void(source, types.int64, target, types.int64, DIM), generate

    @_emitted
    def end_tiles(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _TileCode(context, builder, signature, arguments).tile("tilerelease")
            return context.get_dummy_value()

        return types.void(), generate

    @_emitted
    def turn_pairs(typing_context: Any, rows: Any, panel: Any, at: Any, DIM: Any) -> Any:
        """`TILE_ROWS` rows of DIM numbers become lanes of a panel in pairs.

        `panel[at + d*WIDTH*2 + lane*2 + j]` = number `2d + j` of row `lane`.
        """
        dim = _constant(DIM)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = _TileCode(context, builder, signature, arguments)
            rows, panel = code.pointer(0), code.pointer(1, arguments[2])

            def block(d: Any, carried: list[Any]) -> list[Any]:
                vectors = [_load_words(code, code.move(rows, i * dim, d)) for i in range(16)]
                place = code.move(panel, builder.mul(d, INT(WIDTH)))
                for i, vector in enumerate(_turned(code, vectors)):
                    _store_words(code, vector, code.move(place, i * WIDTH * 2))
                return []

            code.loop(INT(dim), 32, [], block)
            return context.get_dummy_value()

        return types.void(rows, panel, types.int64, DIM), generate

    @_emitted
    def turn_rows(typing_context: Any, rows: Any, turned: Any, ROWS: Any, DIM: Any) -> Any:
        """`turned` [DIM][ROWS] = the transpose of `rows` [ROWS][DIM]."""
        num_rows, dim = _constant(ROWS), _constant(DIM)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = _TileCode(context, builder, signature, arguments)
            shorts = ir.VectorType(ir.IntType(16), 16)

            def wide(address: Any) -> Any:
                row = builder.load(builder.bitcast(address, shorts.as_pointer()), align=2)
                return builder.zext(row, _WORDS)

            def block(d: Any, carried: list[Any]) -> list[Any]:
                for first in range(0, num_rows, 32):
                    pairs = []
                    for i in range(first, first + 32, 2):
                        low = wide(code.pointer(0, d, i * dim))
                        high = wide(code.pointer(0, d, (i + 1) * dim))
                        pairs.append(builder.or_(low, builder.shl(high, _WORDS([16] * 16))))
                    place = code.pointer(1, builder.mul(d, INT(num_rows)), first)
                    for i, vector in enumerate(_turned(code, pairs)):
                        _store_words(code, vector, code.move(place, i * num_rows))
                return []

            code.loop(INT(dim), 16, [], block)
            return context.get_dummy_value()

        return types.void(rows, turned, ROWS, DIM), generate

    @_emitted
    def score_tiles(
        typing_context: Any, keys: Any, q: Any, at: Any, scores: Any, count: Any, DIM: Any
    ) -> Any:
        """`scores[i][lane]` = row `i` of `keys` times the query in `lane`, for `count` rows.

        `count` is a multiple of `STEP`. The panel of queries begins at `at`, in pairs.
        """
        dim = _constant(DIM)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = _TileCode(context, builder, signature, arguments)
            panel = code.pointer(1, arguments[2])

            def rows(i: Any, carried: list[Any]) -> list[Any]:
                keys = code.pointer(0, builder.mul(i, INT(dim)))
                for tile in range(4):
                    code.clear_tile(tile)
                for d in range(0, dim, 32):
                    code.load_tile(4, code.move(keys, d), 2 * dim)
                    code.load_tile(5, code.move(keys, 16 * dim + d), 2 * dim)
                    code.load_tile(6, code.move(panel, d * WIDTH), 4 * WIDTH)
                    code.load_tile(7, code.move(panel, d * WIDTH + 32), 4 * WIDTH)
                    code.multiply_tiles()
                place = code.pointer(3, builder.mul(i, INT(WIDTH)))
                for tile in range(4):
                    code.store_tile(
                        tile, code.move(place, tile // 2 * 16 * WIDTH + tile % 2 * 16), 4 * WIDTH
                    )
                return []

            code.loop(arguments[4], 32, [], rows)
            return context.get_dummy_value()

        return types.void(keys, q, types.int64, scores, types.int64, DIM), generate

    @_emitted
    def soften_pairs(
        typing_context: Any,
        scores: Any,
        count: Any,
        factor: Any,
        tops: Any,
        sums: Any,
        at: Any,
        fading: Any,
        weights: Any,
    ) -> Any:
        """One step of the running softmax of each lane, over `count` rows, an even number.

        As `soften_lanes`, of scores times `factor`; the weights go to `weights`, in pairs.
        """

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = _TileCode(context, builder, signature, arguments)
            b, lanes = builder, HOST_LANES
            count, at = arguments[1], arguments[5]
            factor = code.splat(arguments[2], lanes)
            places = [[code.pointer(n, at, j * lanes) for j in range(LANE_VECTORS)] for n in (3, 4)]
            old = [code.load(place, lanes) for place in places[0]]

            def row(i: Any, more: int = 0) -> list[Any]:
                place = code.pointer(0, b.mul(i, INT(WIDTH)), more * WIDTH)
                return [code.load(code.move(place, j * lanes), lanes) for j in range(LANE_VECTORS)]

            def higher(a: Any, c: Any) -> Any:
                return b.select(b.fcmp_ordered(">", a, c), a, c)

            def compare(i: Any, tops: list[Any]) -> list[Any]:
                return [higher(higher(x, y), top) for x, y, top in zip(row(i), row(i, 1), tops)]

            lowest = code.constant(-np.inf, lanes)
            tops = code.loop(count, 2, [lowest] * LANE_VECTORS, compare)
            tops = [higher(b.fmul(top, factor), before) for top, before in zip(tops, old)]
            zero = code.constant(0, lanes)
            below = [b.fsub(zero, top) for top in tops]

            def rounded(x: Any) -> Any:
                return b.add(b.bitcast(x, _WORDS), _WORDS([0x8000] * 16))

            def change(i: Any, totals: list[Any]) -> list[Any]:
                new = []
                first, second = row(i), row(i, 1)
                for j in range(LANE_VECTORS):
                    x = code.exp2(code.fma(first[j], factor, below[j]), terms=6)
                    y = code.exp2(code.fma(second[j], factor, below[j]), terms=6)
                    high = b.and_(rounded(y), _WORDS([-65536] * 16))
                    pair = b.or_(high, b.lshr(rounded(x), _WORDS([16] * 16)))
                    place = code.pointer(7, b.mul(i, INT(WIDTH)), j * 2 * lanes)
                    _store_words(code, pair, place)
                    new.append(b.fadd(totals[j], b.fadd(x, y)))
                return new

            totals = code.loop(count, 2, [zero] * LANE_VECTORS, change)
            for j in range(LANE_VECTORS):
                faded = code.exp2(b.fsub(old[j], tops[j]))
                code.store(faded, code.pointer(6, j * lanes))
                code.store(tops[j], places[0][j])
                before = code.load(places[1][j], lanes)
                code.store(code.fma(before, faded, totals[j]), places[1][j])
            return context.get_dummy_value()

        return (
            types.void(
                scores, types.int64, types.float32, tops, sums, types.int64, fading, weights
            ),
            generate,
        )

    @_emitted
    def value_tiles(
        typing_context: Any,
        weights: Any,
        turned: Any,
        count: Any,
        fading: Any,
        out: Any,
        at: Any,
        ROWS: Any,
        DIM: Any,
    ) -> Any:
        """`out[d][lane]` = `out * fading[lane]` + sum of `weights[i][lane]` times value `i` at `d`.

        Over the first `count` rows, a multiple of `STEP`. Weights lie in pairs, values turned:
        [DIM][ROWS].
        """
        num_rows, dim = _constant(ROWS), _constant(DIM)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = _TileCode(context, builder, signature, arguments)
            b, lanes = builder, HOST_LANES
            panel = code.pointer(4, arguments[5])
            fading = [code.load(code.pointer(3, j * lanes), lanes) for j in range(LANE_VECTORS)]

            def fade(d: Any, carried: list[Any]) -> list[Any]:
                for j in range(LANE_VECTORS):
                    place = code.move(panel, b.mul(d, INT(WIDTH)), j * lanes)
                    code.store(b.fmul(code.load(place, lanes), fading[j]), place)
                return []

            ones = code.constant(1, lanes)
            changed = [b.fcmp_unordered("!=", vector, ones) for vector in fading]
            any_changed = functools.reduce(b.or_, changed)
            with b.if_then(b.icmp_signed("!=", b.bitcast(any_changed, ir.IntType(lanes)), _NONE)):
                code.loop(INT(dim), 1, [], fade)

            def block(d: Any, carried: list[Any]) -> list[Any]:
                place = code.move(panel, b.mul(d, INT(WIDTH)))
                places = [
                    code.move(place, tile // 2 * 16 * WIDTH + tile % 2 * 16) for tile in range(4)
                ]
                for tile in range(4):
                    code.load_tile(tile, places[tile], 4 * WIDTH)
                values = code.pointer(1, b.mul(d, INT(num_rows)))

                def add(i: Any, carried: list[Any]) -> list[Any]:
                    row = code.move(values, i)
                    code.load_tile(4, row, 2 * num_rows)
                    code.load_tile(5, code.move(row, 16 * num_rows), 2 * num_rows)
                    pairs = code.pointer(0, b.mul(i, INT(WIDTH)))
                    code.load_tile(6, pairs, 4 * WIDTH)
                    code.load_tile(7, code.move(pairs, 32), 4 * WIDTH)
                    code.multiply_tiles()
                    return []

                code.loop(arguments[2], 32, [], add)
                for tile in range(4):
                    code.store_tile(tile, places[tile], 4 * WIDTH)
                return []

            code.loop(INT(dim), 32, [], block)
            return context.get_dummy_value()

        return (
            types.void(weights, turned, types.int64, fading, out, types.int64, ROWS, DIM),
            generate,
        )
