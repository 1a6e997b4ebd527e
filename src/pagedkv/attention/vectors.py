"""The innermost loops of attention, written as vector code.

A loop over numbers that the compiler must first prove to be a loop over vectors comes out well or
badly from release to release, and never with K read once for a whole group of query heads. So
the few loops that read K and V are spelled in LLVM's own vectors: wide loads, multiply-adds into
registers, one prefetch a line. Everything around them is plain compiled Python.

Each has two forms with one meaning: the one that emits code, below, and NumPy's, which runs where
nothing is compiled and says in a line or two what is computed.

Arrays are flat, of one dimension; `rows[i]` is where row `i` begins, so rows may lie anywhere and
block borders are nobody's concern here. What is written in CAPITALS is known when compiling.
`half` says what uint16 numbers are: `BFLOAT16` or `FLOAT16`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import config
from numba.extending import intrinsic
from numpy.typing import NDArray

from pagedkv.attention.vector_code import (
    FLOAT16,
    HOST_LANES,
    INT,
    LANE_ROWS,
    LANE_VECTORS,
    VectorCode,
)

_SUMS = 24 if HOST_LANES == 16 else 8
"""Sums kept in registers at once: of 32 with AVX-512, and of 16 elsewhere."""


def lanes_for(dim: int) -> int:
    """Floats in a vector for rows of `dim` numbers, a multiple of 8."""
    return HOST_LANES if dim % HOST_LANES == 0 else 8


def rows_at_once(heads: int, lanes: int) -> int:
    """Rows that `score_rows` takes at once: with `heads` heads their sums fill one vector."""
    rows = lanes
    while rows * heads > lanes and rows > 1:
        rows //= 2
    return rows


if config.DISABLE_JIT:

    def _widen(numbers: NDArray[Any], half: int) -> NDArray[np.float32]:
        if numbers.dtype == np.float32:
            return numbers
        if half == FLOAT16:
            return numbers.view(np.float16).astype(np.float32)
        return (numbers.astype(np.uint32) << 16).view(np.float32)

    def _matrix(
        array: NDArray[Any], rows: NDArray[np.int64], dim: int, half: int
    ) -> NDArray[np.float32]:
        return _widen(array[rows[:, None] + np.arange(dim)], half)

    def copy_row(
        source: NDArray[Any], s: int, target: NDArray[Any], t: int, dim: int, half: int
    ) -> None:
        row = source[s : s + dim]
        if row.dtype != target.dtype and half == FLOAT16:
            with np.errstate(over="ignore"):
                row = row.astype(np.float16).view(np.uint16)
        elif row.dtype != target.dtype:
            bits = row.view(np.uint32).astype(np.uint64)
            row = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
            row[np.isnan(source[s : s + dim])] = 0x7FC0
        target[t : t + dim] = row

    def widen_row(
        source: NDArray[Any], s: int, target: NDArray[np.float32], t: int, dim: int, half: int
    ) -> None:
        target[t : t + dim] = _widen(source[s : s + dim], half)

    def claim(counters: NDArray[np.int64], i: int) -> int:
        counters[i] += 1
        return int(counters[i]) - 1

    def score_rows(
        q: NDArray[np.float32],
        keys: NDArray[Any],
        rows: NDArray[np.int64],
        first: int,
        scores: NDArray[np.float32],
        pitch: int,
        ahead: NDArray[np.int64],
        HEADS: int,
        DIM: int,
        AHEAD: int,
        half: int,
    ) -> None:
        num = rows_at_once(HEADS, lanes_for(DIM))
        k = _matrix(keys, rows[first : first + num], DIM, half)
        scores.reshape(-1, pitch)[:HEADS, first : first + num] = q.reshape(HEADS, DIM) @ k.T

    def value_rows(
        weights: NDArray[np.float32],
        pitch: int,
        values: NDArray[Any],
        rows: NDArray[np.int64],
        count: int,
        fading: NDArray[np.float32],
        out: NDArray[np.float32],
        ahead: NDArray[np.int64],
        HEADS: int,
        DIM: int,
        AHEAD: int,
        half: int,
    ) -> None:
        sums = out.reshape(HEADS, DIM)
        sums *= fading[:HEADS, None]
        v = _matrix(values, rows[:count], DIM, half)
        sums += weights.reshape(-1, pitch)[:HEADS, :count] @ v

    def cap(scores: NDArray[np.float32], first: int, count: int, factor: float) -> None:
        scores[first : first + count] = factor * np.tanh(scores[first : first + count])

    def highest(scores: NDArray[np.float32], first: int, count: int) -> Any:
        return scores[first : first + count].max()

    def soften(scores: NDArray[np.float32], first: int, count: int, shift: float) -> Any:
        part = scores[first : first + count]
        part[:] = np.exp2(part - np.float32(shift))
        return part.sum()

    def score_lanes(
        keys: NDArray[np.float32],
        rows: NDArray[np.int64],
        first: int,
        q: NDArray[np.float32],
        at: int,
        scores: NDArray[np.float32],
        DIM: int,
    ) -> None:
        width = HOST_LANES * LANE_VECTORS
        k = _matrix(keys, rows[first : first + LANE_ROWS], DIM, 0)
        panel = q[at : at + DIM * width].reshape(DIM, width)
        with np.errstate(invalid="ignore", over="ignore"):  # rows behind the last hold anything
            scores.reshape(-1, width)[first : first + LANE_ROWS] = k @ panel

    def value_lanes(
        weights: NDArray[np.float32],
        values: NDArray[np.float32],
        rows: NDArray[np.int64],
        count: int,
        fading: NDArray[np.float32],
        out: NDArray[np.float32],
        at: int,
        DIM: int,
    ) -> None:
        width = HOST_LANES * LANE_VECTORS
        sums = out[at : at + DIM * width].reshape(DIM, width)
        sums *= fading[:width]
        v = _matrix(values, rows[:count], DIM, 0)
        sums += v.T @ weights.reshape(-1, width)[:count]

    def soften_lanes(
        scores: NDArray[np.float32],
        count: int,
        tops: NDArray[np.float32],
        sums: NDArray[np.float32],
        at: int,
        fading: NDArray[np.float32],
    ) -> None:
        width = HOST_LANES * LANE_VECTORS
        part = scores[: count * width].reshape(count, width)
        old = tops[at : at + width].copy()
        tops[at : at + width] = np.maximum(old, part.max(axis=0))
        fading[:width] = np.exp2(old - tops[at : at + width])
        part[:] = np.exp2(part - tops[at : at + width])
        sums[at : at + width] = sums[at : at + width] * fading[:width] + part.sum(axis=0)

else:

    def _emitted(function: Callable[..., Any]) -> Any:
        """For compiled callers: `function` says the types and how code is emitted."""
        return intrinsic(prefer_literal=True)(function)

    def _constant(literal: Any) -> int:
        return int(literal.literal_value)

    @_emitted
    def claim(typing_context: Any, counters: Any, i: Any) -> Any:
        """The next number of counter `i`, each once, whichever thread asks.

        What a thread wrote before is there for those who get a later number.
        """

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = VectorCode(context, builder, signature, arguments)
            return builder.atomic_rmw("add", code.pointer(0, arguments[1]), INT(1), "acq_rel")

        return types.int64(counters, types.int64), generate

    @_emitted
    def copy_row(
        typing_context: Any, source: Any, s: Any, target: Any, t: Any, dim: Any, half: Any
    ) -> Any:
        """`target[t:t+dim] = source[s:s+dim]`, rounded to nearest even where it is narrower.

        `dim` is a multiple of 8.
        """

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = VectorCode(context, builder, signature, arguments)
            _, s, _, t, dim, half = arguments
            narrows = signature.args[0].dtype == types.float32 != signature.args[2].dtype
            words = ir.VectorType(ir.IntType(32), 8)
            shorts = ir.VectorType(ir.IntType(16), 8)

            def copy(i: Any, carried: list[Any]) -> list[Any]:
                b = builder
                source = code.pointer(0, s, i)
                vector = ir.VectorType(source.type.pointee, 8)
                row = b.load(b.bitcast(source, vector.as_pointer()), align=2)
                if narrows:
                    halves = b.fptrunc(row, ir.VectorType(ir.HalfType(), 8))
                    bits = b.bitcast(row, words)
                    odd = b.and_(b.lshr(bits, words([16] * 8)), words([1] * 8))
                    rounded = b.add(bits, b.add(odd, words([0x7FFF] * 8)))
                    brain = b.trunc(b.lshr(rounded, words([16] * 8)), shorts)
                    # Rounding the bits of a NaN could make another number of it.
                    brain = b.select(b.fcmp_unordered("uno", row, row), shorts([0x7FC0] * 8), brain)
                    is_half = b.icmp_signed("==", half, INT(FLOAT16))
                    row = b.select(code.splat(is_half, 8), b.bitcast(halves, shorts), brain)
                place = code.pointer(2, t, i)
                b.store(row, b.bitcast(place, row.type.as_pointer()), align=2)
                return []

            code.loop(dim, 8, [], copy)
            return context.get_dummy_value()

        return types.void(source, types.int64, target, types.int64, types.int64, types.int64), (
            generate
        )

    @_emitted
    def widen_row(
        typing_context: Any, source: Any, s: Any, target: Any, t: Any, DIM: Any, half: Any
    ) -> Any:
        """`target[t:t+DIM] = source[s:s+DIM]`, which becomes float32."""
        dim, kind = _constant(DIM), _constant(half)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = VectorCode(context, builder, signature, arguments)
            lanes = lanes_for(dim)
            for d in range(0, dim, lanes):
                row = code.load(code.pointer(0, arguments[1], d), lanes, kind)
                code.store(row, code.pointer(2, arguments[3], d))
            return context.get_dummy_value()

        return types.void(source, types.int64, target, types.int64, DIM, half), generate

    @_emitted
    def score_rows(
        typing_context: Any,
        q: Any,
        keys: Any,
        rows: Any,
        first: Any,
        scores: Any,
        pitch: Any,
        ahead: Any,
        HEADS: Any,
        DIM: Any,
        AHEAD: Any,
        half: Any,
    ) -> Any:
        """`scores[head*pitch + i]` = query of `head` times row `i`, for some rows from `first` on.

        As many rows as `rows_at_once` says. Meanwhile as many rows of `ahead`, `AHEAD` numbers
        each, are asked for.
        """
        heads, dim, kind = _constant(HEADS), _constant(DIM), _constant(half)
        ahead_bytes = _constant(AHEAD) * keys.dtype.bitwidth // 8
        lanes = lanes_for(dim)
        num_rows = rows_at_once(heads, lanes)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = VectorCode(context, builder, signature, arguments)
            first, pitch = arguments[3], arguments[5]
            keys = [
                code.pointer(1, builder.load(code.pointer(2, first, i))) for i in range(num_rows)
            ]
            queries = code.pointer(0)
            for i in range(num_rows):
                code.prefetch_lines(
                    code.pointer(1, builder.load(code.pointer(6, first, i))), ahead_bytes
                )

            def add(d: Any, sums: list[Any]) -> list[Any]:
                k = [code.load(code.move(key, d), lanes, kind) for key in keys]
                new = []
                for head in range(heads):
                    query = code.load(code.move(queries, d, head * dim), lanes)
                    new += [
                        code.fma(query, k[i], sums[head * num_rows + i]) for i in range(num_rows)
                    ]
                return new

            sums = [code.constant(0, lanes)] * (heads * num_rows)
            if dim * len(sums) <= 256 * lanes:
                for d in range(0, dim, lanes):
                    sums = add(INT(d), sums)
            else:
                sums = code.loop(INT(dim), lanes, sums, add)
            sums += [code.constant(0, lanes)] * (-len(sums) % lanes)
            for start in range(0, len(sums), lanes):
                totals = code.sums_of(sums[start : start + lanes])
                for i in range(0, lanes, num_rows):
                    head = (start + i) // num_rows
                    if head < heads:
                        some = code.shuffle(totals, totals, list(range(i, i + num_rows)))
                        place = builder.mul(pitch, INT(head))
                        code.store(some, code.pointer(4, place, first))
            return context.get_dummy_value()

        return (
            types.void(
                q, keys, rows, types.int64, scores, types.int64, ahead, HEADS, DIM, AHEAD, half
            ),
            generate,
        )

    @_emitted
    def value_rows(
        typing_context: Any,
        weights: Any,
        pitch: Any,
        values: Any,
        rows: Any,
        count: Any,
        fading: Any,
        out: Any,
        ahead: Any,
        HEADS: Any,
        DIM: Any,
        AHEAD: Any,
        half: Any,
    ) -> Any:
        """`out[head] = out[head] * fading[head]` + the sum of `weights[head*pitch + i]` × row `i`.

        Over the first `count` rows. Meanwhile as many rows of `ahead`, `AHEAD` numbers each, are
        asked for.
        """
        heads, dim, kind = _constant(HEADS), _constant(DIM), _constant(half)
        ahead_bytes = _constant(AHEAD) * values.dtype.bitwidth // 8
        lanes = lanes_for(dim)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = VectorCode(context, builder, signature, arguments)
            pitch, count = arguments[1], arguments[4]
            columns = max(1, _SUMS // heads)
            weight_of = [code.pointer(0, builder.mul(pitch, INT(h))) for h in range(heads)]
            passes = -(-dim // (columns * lanes))
            for start in range(0, dim, columns * lanes):
                places = range(start, min(dim, start + columns * lanes), lanes)
                sums = []
                for head in range(heads):
                    faded = code.splat(builder.load(code.pointer(5, head)), lanes)
                    for d in places:
                        old = code.load(code.pointer(6, head * dim + d), lanes)
                        sums.append(builder.fmul(old, faded))

                def add(i: Any, sums: list[Any], places: range = places) -> list[Any]:
                    following = code.pointer(2, builder.load(code.pointer(7, i)))
                    turn = places[0] // (columns * lanes)
                    code.prefetch_lines(following, ahead_bytes, turn, passes)
                    row = builder.load(code.pointer(3, i))
                    vectors = [code.load(code.pointer(2, row, d), lanes, kind) for d in places]
                    new = []
                    for head in range(heads):
                        weight = builder.load(code.move(weight_of[head], i))
                        weight = code.splat(weight, lanes)
                        for j, vector in enumerate(vectors):
                            new.append(code.fma(weight, vector, sums[head * len(places) + j]))
                    return new

                sums = code.loop(count, 1, sums, add)
                for j, total in enumerate(sums):
                    head, column = divmod(j, len(places))
                    code.store(total, code.pointer(6, head * dim + places[column]))
            return context.get_dummy_value()

        return (
            types.void(
                weights,
                types.int64,
                values,
                rows,
                types.int64,
                fading,
                out,
                ahead,
                HEADS,
                DIM,
                AHEAD,
                half,
            ),
            generate,
        )

    @_emitted
    def cap(typing_context: Any, scores: Any, first: Any, count: Any, factor: Any) -> Any:
        """`factor * tanh(score)`, in place, for a multiple of 8 scores."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = VectorCode(context, builder, signature, arguments)
            factor = code.splat(arguments[3], 8)

            def change(i: Any, carried: list[Any]) -> list[Any]:
                place = code.pointer(0, arguments[1], i)
                code.store(builder.fmul(code.tanh(code.load(place, 8)), factor), place)
                return []

            code.loop(arguments[2], 8, [], change)
            return context.get_dummy_value()

        return types.void(scores, types.int64, types.int64, types.float32), generate

    @_emitted
    def highest(typing_context: Any, scores: Any, first: Any, count: Any) -> Any:
        """The highest of a multiple of `HOST_LANES` scores."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = VectorCode(context, builder, signature, arguments)
            lanes = HOST_LANES

            def compare(i: Any, top: list[Any]) -> list[Any]:
                vector = code.load(code.pointer(0, arguments[1], i), lanes)
                return [code.call("llvm.maxnum", vector, top[0])]

            [top] = code.loop(arguments[2], lanes, [code.constant(-np.inf, lanes)], compare)
            width = lanes
            while width > 1:
                width //= 2
                low = code.shuffle(top, top, list(range(width)))
                top = code.call(
                    "llvm.maxnum", low, code.shuffle(top, top, list(range(width, 2 * width)))
                )
            return builder.extract_element(top, ir.IntType(32)(0))

        return types.float32(scores, types.int64, types.int64), generate

    @_emitted
    def soften(typing_context: Any, scores: Any, first: Any, count: Any, shift: Any) -> Any:
        """`2 ** (score - shift)`, in place, for a multiple of `HOST_LANES`; returns their sum."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = VectorCode(context, builder, signature, arguments)
            lanes = HOST_LANES
            shift = code.splat(arguments[3], lanes)

            def change(i: Any, total: list[Any]) -> list[Any]:
                place = code.pointer(0, arguments[1], i)
                power = code.exp2(builder.fsub(code.load(place, lanes), shift))
                code.store(power, place)
                return [builder.fadd(total[0], power)]

            [total] = code.loop(arguments[2], lanes, [code.constant(0, lanes)], change)
            width = lanes
            while width > 1:
                width //= 2
                low = code.shuffle(total, total, list(range(width)))
                total = builder.fadd(low, code.shuffle(total, total, list(range(width, 2 * width))))
            return builder.extract_element(total, ir.IntType(32)(0))

        return types.float32(scores, types.int64, types.int64, types.float32), generate

    @_emitted
    def score_lanes(
        typing_context: Any,
        keys: Any,
        rows: Any,
        first: Any,
        q: Any,
        at: Any,
        scores: Any,
        DIM: Any,
    ) -> Any:
        """`scores[i][lane]` = row `i` times the query in `lane`, for `LANE_ROWS` rows from `first`.

        The panel of queries begins at `at` and lies [DIM, lanes].
        """
        dim = _constant(DIM)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = VectorCode(context, builder, signature, arguments)
            first, at = arguments[2], arguments[4]
            lanes, width = HOST_LANES, HOST_LANES * LANE_VECTORS
            keys = [
                code.pointer(0, builder.load(code.pointer(1, first, i))) for i in range(LANE_ROWS)
            ]
            panel = code.pointer(3, at)

            def add(d: Any, sums: list[Any]) -> list[Any]:
                queries = code.move(panel, builder.mul(d, INT(width)))
                vectors = [
                    code.load(code.move(queries, j * lanes), lanes) for j in range(LANE_VECTORS)
                ]
                new = []
                for i in range(LANE_ROWS):
                    number = code.splat(builder.load(code.move(keys[i], d)), lanes)
                    for j in range(LANE_VECTORS):
                        new.append(code.fma(number, vectors[j], sums[i * LANE_VECTORS + j]))
                return new

            sums = code.loop(
                INT(dim), 1, [code.constant(0, lanes)] * (LANE_ROWS * LANE_VECTORS), add
            )
            place = code.pointer(5, builder.mul(first, INT(width)))
            for i, total in enumerate(sums):
                code.store(total, code.move(place, i * lanes))
            return context.get_dummy_value()

        return (
            types.void(keys, rows, types.int64, q, types.int64, scores, DIM),
            generate,
        )

    @_emitted
    def value_lanes(
        typing_context: Any,
        weights: Any,
        values: Any,
        rows: Any,
        count: Any,
        fading: Any,
        out: Any,
        at: Any,
        DIM: Any,
    ) -> Any:
        """`out[d][lane]` = `out * fading[lane]` + sum of `weights[i][lane]` times row `i` at `d`.

        Over the first `count` rows; the panel of sums begins at `at` and lies [DIM, lanes].
        """
        dim = _constant(DIM)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = VectorCode(context, builder, signature, arguments)
            count, at = arguments[3], arguments[6]
            lanes, width = HOST_LANES, HOST_LANES * LANE_VECTORS
            # 8 divides every dim, and LANE_ROWS rows of sums are what the registers hold.
            step = max(n for n in range(1, LANE_ROWS + 1) if dim % n == 0)
            fading = [code.load(code.pointer(4, j * lanes), lanes) for j in range(LANE_VECTORS)]

            def block(start: Any, carried: list[Any]) -> list[Any]:
                place = code.pointer(5, at, builder.mul(start, INT(width)))
                sums = [
                    builder.fmul(
                        code.load(code.move(place, i * width + j * lanes), lanes), fading[j]
                    )
                    for i in range(step)
                    for j in range(LANE_VECTORS)
                ]

                def add(i: Any, sums: list[Any]) -> list[Any]:
                    weight = code.pointer(0, builder.mul(i, INT(width)))
                    vectors = [
                        code.load(code.move(weight, j * lanes), lanes) for j in range(LANE_VECTORS)
                    ]
                    row = code.pointer(1, builder.load(code.pointer(2, i)), start)
                    new = []
                    for d in range(step):
                        number = code.splat(builder.load(code.move(row, d)), lanes)
                        for j in range(LANE_VECTORS):
                            new.append(code.fma(number, vectors[j], sums[d * LANE_VECTORS + j]))
                    return new

                for i, total in enumerate(code.loop(count, 1, sums, add)):
                    code.store(total, code.move(place, i * lanes))
                return []

            code.loop(INT(dim), step, [], block)
            return context.get_dummy_value()

        return (
            types.void(weights, values, rows, types.int64, fading, out, types.int64, DIM),
            generate,
        )

    @_emitted
    def soften_lanes(
        typing_context: Any, scores: Any, count: Any, tops: Any, sums: Any, at: Any, fading: Any
    ) -> Any:
        """One step of the running softmax of each lane, over `count` rows of scores.

        `tops` and `sums`, from `at` on, are the highest score and the sum of weights so far;
        scores become weights, `fading` what the weights before must be multiplied with.
        """

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = VectorCode(context, builder, signature, arguments)
            count, at = arguments[1], arguments[4]
            lanes, width = HOST_LANES, HOST_LANES * LANE_VECTORS
            places = [[code.pointer(n, at, j * lanes) for j in range(LANE_VECTORS)] for n in (2, 3)]
            fading = [code.pointer(5, j * lanes) for j in range(LANE_VECTORS)]
            old = [code.load(place, lanes) for place in places[0]]

            def row(i: Any) -> list[Any]:
                place = code.pointer(0, builder.mul(i, INT(width)))
                return [code.move(place, j * lanes) for j in range(LANE_VECTORS)]

            def compare(i: Any, tops: list[Any]) -> list[Any]:
                return [
                    code.call("llvm.maxnum", code.load(place, lanes), top)
                    for place, top in zip(row(i), tops)
                ]

            tops = code.loop(count, 1, old, compare)

            def change(i: Any, totals: list[Any]) -> list[Any]:
                new = []
                for place, top, total in zip(row(i), tops, totals):
                    power = code.exp2(builder.fsub(code.load(place, lanes), top))
                    code.store(power, place)
                    new.append(builder.fadd(total, power))
                return new

            totals = code.loop(count, 1, [code.constant(0, lanes)] * LANE_VECTORS, change)
            for j in range(LANE_VECTORS):
                faded = code.exp2(builder.fsub(old[j], tops[j]))
                code.store(faded, fading[j])
                code.store(tops[j], places[0][j])
                before = code.load(places[1][j], lanes)
                code.store(code.fma(before, faded, totals[j]), places[1][j])
            return context.get_dummy_value()

        return types.void(scores, types.int64, tops, sums, types.int64, fading), generate
