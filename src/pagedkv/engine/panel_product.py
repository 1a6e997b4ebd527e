"""Products of rows with a weight that is kept in panels: read once, in order, from end to end.

Generating multiplies a few rows with every weight of the model, which takes as long as reading the
weights does, if nothing else holds it up. So the outputs of a weight are cut into *panels* of as
many as fill two vectors, and the numbers of a panel lie input by input, as they are used: memory
is read in one run, and asked for a page ahead while the rows are multiplied.

::

    weight [outputs, inputs]      panel 0: inputs x PANEL numbers, panel 1, ... (zeros at the end)

A number of the result is one sum, in the order of the inputs, however many rows there are and
whichever thread computes it: what a row gives does not depend on the others of its batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.core import config
from numba.extending import intrinsic
from numpy.typing import NDArray

from pagedkv.attention.vector_code import (
    HOST_LANES,
    INT,
    LANE_ROWS,
    LANE_VECTORS,
    VectorCode,
)
from pagedkv.attention.vectors import claim
from pagedkv.compiling import CompiledTask, compiled_in_place, numbers_at

PANEL = HOST_LANES * LANE_VECTORS
"""Outputs of a panel."""

_AHEAD = 1024
"""Numbers of a panel that are asked for before they are used: 4 KiB."""

(NEXT, ROWS, NUM_ROWS, INPUTS, WEIGHT, BIAS, HAS_BIAS, OUT, OUTPUTS, PIECES) = range(10)
"""Places in a task's numbers: the next piece to take, then what `multiply` takes."""


def packed(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """`weight` [outputs, inputs] in panels, one dimension."""
    outputs, inputs = weight.shape
    num_panels = -(-outputs // PANEL)
    # Of large arrays NumPy's lie on large pages; a line of the cache begins with a vector.
    raw = np.empty(num_panels * inputs * PANEL + 16, dtype=np.float32)
    start = -raw.ctypes.data % 64 // 4
    panels = raw[start : start + num_panels * inputs * PANEL].reshape(num_panels, inputs, PANEL)
    whole = outputs // PANEL
    panels[:whole] = weight[: whole * PANEL].reshape(whole, PANEL, inputs).transpose(0, 2, 1)
    if whole < num_panels:
        panels[whole] = 0
        panels[whole, :, : outputs - whole * PANEL] = weight[whole * PANEL :].T
    return panels.reshape(-1)


if config.DISABLE_JIT:

    def multiply_rows(
        rows: NDArray[np.float32],
        first: int,
        count: int,
        inputs: int,
        weight: NDArray[np.float32],
        at: int,
        out: NDArray[np.float32],
        out_at: int,
        pitch: int,
        AT_ONCE: int,
    ) -> None:
        x = rows[first * inputs : (first + count) * inputs].reshape(count, inputs)
        product = x @ weight[at : at + inputs * PANEL].reshape(inputs, PANEL)
        for i in range(count):
            out[out_at + i * pitch : out_at + i * pitch + PANEL] = product[i]

else:

    @intrinsic(prefer_literal=True)
    def multiply_rows(
        typing_context: Any,
        rows: Any,
        first: Any,
        count: Any,
        inputs: Any,
        weight: Any,
        at: Any,
        out: Any,
        out_at: Any,
        pitch: Any,
        AT_ONCE: Any,
    ) -> Any:
        """`count` rows from `first` on, times the panel at `at`; `PANEL` numbers each.

        They go to `out_at`, `pitch` numbers from one row to the next. `count` is at most `AT_ONCE`
        and at least 1: what is missing to `AT_ONCE` is the last row once more.
        """
        at_once = int(AT_ONCE.literal_value)
        unrolled = 4 if at_once < 4 else 1

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            code = VectorCode(context, builder, signature, arguments)
            _, first, count, inputs, _, at, _, out_at, pitch, _ = arguments
            last = builder.sub(count, INT(1))
            numbers = [INT(i) for i in range(at_once)]
            numbers = [builder.select(builder.icmp_signed("<", i, last), i, last) for i in numbers]
            begin = code.pointer(0, builder.mul(first, inputs))
            rows = [code.move(begin, builder.mul(i, inputs)) for i in numbers]
            panel = code.pointer(4, at)

            def add_one(input: Any, sums: list[Any]) -> list[Any]:
                place = code.move(panel, builder.mul(input, INT(PANEL)))
                code.prefetch_lines(code.move(place, _AHEAD), PANEL * 4)
                vectors = [
                    code.load(code.move(place, j * HOST_LANES), HOST_LANES)
                    for j in range(LANE_VECTORS)
                ]
                new = []
                for i in range(at_once):
                    number = code.splat(builder.load(code.move(rows[i], input)), HOST_LANES)
                    for j in range(LANE_VECTORS):
                        new.append(code.fma(number, vectors[j], sums[i * LANE_VECTORS + j]))
                return new

            def add(input: Any, sums: list[Any]) -> list[Any]:
                for i in range(unrolled):
                    sums = add_one(builder.add(input, INT(i)), sums)
                return sums

            sums = [code.constant(0, HOST_LANES)] * (at_once * LANE_VECTORS)
            for i, total in enumerate(code.loop(inputs, unrolled, sums, add)):
                row, j = divmod(i, LANE_VECTORS)
                place = code.pointer(6, out_at, builder.mul(numbers[row], pitch))
                code.store(total, code.move(place, j * HOST_LANES))
            return context.get_dummy_value()

        return (
            types.void(
                rows,
                types.int64,
                types.int64,
                types.int64,
                weight,
                types.int64,
                out,
                types.int64,
                types.int64,
                AT_ONCE,
            ),
            generate,
        )


@compiled_in_place
def multiply(
    counters: NDArray[np.int64],
    rows: NDArray[np.float32],
    num_rows: int,
    inputs: int,
    weight: NDArray[np.float32],
    bias: NDArray[np.float32],
    has_bias: int,
    out: NDArray[np.float32],
    outputs: int,
    pieces: int,
) -> None:
    """`out` [num_rows, outputs] = `rows` [num_rows, inputs] times a packed weight, plus a bias.

    All are of one dimension; `inputs` is a multiple of 4. Where `outputs` is not whole panels,
    `out` has room for `num_rows` times `PANEL` more numbers behind it. Whoever runs this takes
    runs of panels, `pieces` in all, until `counters[NEXT]` says that none is left.
    """
    num_panels = (outputs + PANEL - 1) // PANEL
    # Rows as evenly as they can be, since a weight that waits for one row more is read again.
    num_groups = (num_rows + LANE_ROWS - 1) // LANE_ROWS
    each = (num_rows + num_groups - 1) // num_groups
    while True:
        piece = claim(counters, NEXT)
        if piece >= pieces:
            break
        for panel in range(num_panels * piece // pieces, num_panels * (piece + 1) // pieces):
            at = panel * inputs * PANEL
            width = min(PANEL, outputs - panel * PANEL)
            place, pitch = panel * PANEL, outputs
            if width < PANEL:
                place, pitch = num_rows * outputs, PANEL
            first = 0
            while first < num_rows:
                count = min(each, num_rows - first)
                to = place + first * pitch
                if count > 8:
                    multiply_rows(rows, first, count, inputs, weight, at, out, to, pitch, 12)
                elif count > 6:
                    multiply_rows(rows, first, count, inputs, weight, at, out, to, pitch, 8)
                elif count > 4:
                    multiply_rows(rows, first, count, inputs, weight, at, out, to, pitch, 6)
                elif count > 2:
                    multiply_rows(rows, first, count, inputs, weight, at, out, to, pitch, 4)
                elif count > 1:
                    multiply_rows(rows, first, count, inputs, weight, at, out, to, pitch, 2)
                else:
                    multiply_rows(rows, first, count, inputs, weight, at, out, to, pitch, 1)
                first += count
            if width < PANEL or has_bias:
                for i in range(num_rows):
                    source, target = place + i * pitch, i * outputs + panel * PANEL
                    for j in range(width):
                        number = out[source + j]
                        if has_bias:
                            number += bias[panel * PANEL + j]
                        out[target + j] = number


def _multiply_task(numbers: Any) -> None:
    counters = carray(numbers, 1)
    num_rows, inputs, outputs = numbers[NUM_ROWS], numbers[INPUTS], numbers[OUTPUTS]
    num_panels = (outputs + PANEL - 1) // PANEL
    rows = carray(numbers_at(numbers[ROWS], "float32"), num_rows * inputs)
    weight = carray(numbers_at(numbers[WEIGHT], "float32"), num_panels * inputs * PANEL)
    bias = carray(numbers_at(numbers[BIAS], "float32"), outputs)
    out = carray(numbers_at(numbers[OUT], "float32"), num_rows * (outputs + PANEL))
    has_bias, pieces = numbers[HAS_BIAS], numbers[PIECES]
    multiply(counters, rows, num_rows, inputs, weight, bias, has_bias, out, outputs, pieces)


multiply_task = CompiledTask(_multiply_task)
"""`multiply` by addresses, for `Threads`."""
