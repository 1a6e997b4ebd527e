"""Vector code, spelled from Python: what the innermost loops are written in.

A loop over numbers that the compiler must first prove to be a loop over vectors comes out well or
badly from release to release. Here the loads, the multiply-adds and the loops around them are
LLVM's own, and say how many numbers they take at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

BFLOAT16 = 1
FLOAT16 = 2

_HOST_FEATURES = llvm.get_host_cpu_features()

HOST_LANES = 16 if _HOST_FEATURES.get("avx512f") else 8
"""Floats in a vector. Where registers are narrower than that, the compiler takes two."""

LINE_BYTES = 64

LANE_VECTORS = 2
"""Vectors, side by side, that meet rows of numbers where there is much arithmetic."""

LANE_ROWS = 12 if HOST_LANES == 16 else 6
"""Rows that meet those vectors at once: all their sums stay in registers."""

INT, FLOAT = ir.IntType(64), ir.FloatType()


class VectorCode:
    """Emits vector code at the builder's place, inside one of Numba's intrinsics."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self.context, self.builder = context, builder
        self.types = signature.args
        self.arguments = arguments

    def pointer(self, argument: int, *offsets: Any) -> Any:
        """The address in array number `argument`, the offsets added up."""
        array = self.context.make_array(self.types[argument])
        address = array(self.context, self.builder, self.arguments[argument]).data
        return self.move(address, *offsets)

    def move(self, address: Any, *offsets: Any) -> Any:
        for offset in offsets:
            offset = INT(offset) if isinstance(offset, int) else offset
            address = self.builder.gep(address, [offset])
        return address

    def load(self, address: Any, lanes: int, half: int = 0) -> Any:
        """`lanes` floats from `address`; bits of half precision become floats."""
        b = self.builder
        number = address.type.pointee
        vector = ir.VectorType(number, lanes)
        loaded = b.load(
            b.bitcast(address, vector.as_pointer()),
            align=number.width // 8 if isinstance(number, ir.IntType) else 4,
        )
        if number == FLOAT:
            return loaded
        if half == FLOAT16:
            halves = b.bitcast(loaded, ir.VectorType(ir.HalfType(), lanes))
            return b.fpext(halves, ir.VectorType(FLOAT, lanes))
        wide = ir.VectorType(ir.IntType(32), lanes)
        return b.bitcast(
            b.shl(b.zext(loaded, wide), wide([16] * lanes)), ir.VectorType(FLOAT, lanes)
        )

    def store(self, vector: Any, address: Any) -> None:
        self.builder.store(vector, self.builder.bitcast(address, vector.type.as_pointer()), align=4)

    def splat(self, number: Any, lanes: int) -> Any:
        b = self.builder
        vector = ir.VectorType(number.type, lanes)
        one = b.insert_element(ir.Constant(vector, ir.Undefined), number, ir.IntType(32)(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
        return b.shuffle_vector(one, one, zeros)

    def constant(self, number: float, lanes: int) -> Any:
        return ir.Constant(ir.VectorType(FLOAT, lanes), [float(np.float32(number))] * lanes)

    def shuffle(self, a: Any, b: Any, picks: list[int]) -> Any:
        mask = ir.Constant(ir.VectorType(ir.IntType(32), len(picks)), picks)
        return self.builder.shuffle_vector(a, b, mask)

    def call(self, name: str, vector: Any, *arguments: Any) -> Any:
        """LLVM's intrinsic `name` on values of one type."""
        module, of = self.builder.module, vector.type
        name = f"{name}.v{of.count}f32"
        function = module.globals.get(name) or ir.Function(
            module, ir.FunctionType(of, [of] * (1 + len(arguments))), name
        )
        return self.builder.call(function, [vector, *arguments])

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """`a * b + c`, rounded once."""
        return self.call("llvm.fma", a, b, c)

    def loop(
        self, stop: Any, step: int, carried: list[Any], body: Callable[[Any, list[Any]], list[Any]]
    ) -> list[Any]:
        """`for i in range(0, stop, step): carried = body(i, carried)`; returns what is carried."""
        b = self.builder
        entry = b.block
        begin, done = b.append_basic_block("loop"), b.append_basic_block("done")
        b.cbranch(b.icmp_signed(">", stop, INT(0)), begin, done)
        b.position_at_end(begin)
        index = b.phi(INT)
        index.add_incoming(INT(0), entry)
        phis = [b.phi(value.type) for value in carried]
        for phi, value in zip(phis, carried):
            phi.add_incoming(value, entry)
        results = body(index, phis)
        following = b.add(index, INT(step), flags=["nsw"])
        end = b.block
        for phi, value in zip([index, *phis], [following, *results]):
            phi.add_incoming(value, end)
        b.cbranch(b.icmp_signed("<", following, stop), begin, done)
        b.position_at_end(done)
        finals = []
        for value, result in zip(carried, results):
            final = b.phi(value.type)
            final.add_incoming(value, entry)
            final.add_incoming(result, end)
            finals.append(final)
        return finals

    def sums_of(self, vectors: list[Any]) -> Any:
        """One vector whose lane `i` is the sum of the lanes of vector `i`, as many as lanes.

        Folded pairwise, and within 16 bytes first: those shuffles are the cheap ones.
        """
        lanes = len(vectors)
        spans = [1, 2] + [span for span in (8, 4) if span < lanes]
        # The same folding of names tells which vector must start where.
        names = [[i] * lanes for i in range(lanes)]
        for span in spans:
            names = [
                [(a + b)[i] for i in _fold(span, lanes)[0]] for a, b in zip(names[::2], names[1::2])
            ]
        vectors = [vectors[names[0].index(i)] for i in range(lanes)]
        for span in spans:
            low, high = _fold(span, lanes)
            vectors = [
                self.builder.fadd(self.shuffle(a, b, low), self.shuffle(a, b, high))
                for a, b in zip(vectors[::2], vectors[1::2])
            ]
        return vectors[0]

    def prefetch(self, address: Any) -> None:
        """Ask for a line, for reading, to be kept in every level but the smallest."""
        b = self.builder
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = b.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        )
        b.call(function, [b.bitcast(address, byte), word(0), word(2), word(1)])

    def prefetch_lines(self, address: Any, nbytes: int, first: int = 0, step: int = 1) -> None:
        """Ask for every `step`-th line of a row, from line number `first` on."""
        address = self.builder.bitcast(address, ir.IntType(8).as_pointer())
        for line in range(first, -(-nbytes // LINE_BYTES), step):
            self.prefetch(self.move(address, line * LINE_BYTES))

    def exp2(self, x: Any, terms: int = 8) -> Any:
        """2 to the `x`, for `x` up to 127; below -126.5 it is 0.

        The whole part goes into the exponent's bits, the rest, at most a half, into the series
        of exp(x ln 2): 8 terms of it are right within two units of the last place, 6 to 3e-6.
        """
        b, lanes = self.builder, x.type.count
        words = ir.VectorType(ir.IntType(32), lanes)
        # The bits of the exponent of -127 are 0, and so is the product. A NaN stays one.
        lowest = self.constant(-127, lanes)
        x = b.select(b.fcmp_ordered("<", x, lowest), lowest, x)
        whole = self.call("llvm.rint", x)
        rest = b.fsub(x, whole)
        power = self.constant(_EXP2[terms - 1], lanes)
        for coefficient in _EXP2[terms - 2 :: -1]:
            power = self.fma(power, rest, self.constant(coefficient, lanes))
        exponent = b.shl(b.add(b.fptosi(whole, words), words([127] * lanes)), words([23] * lanes))
        return b.fmul(power, b.bitcast(exponent, x.type))

    def tanh(self, x: Any) -> Any:
        """The odd series near 0, where 1 - 2 / (exp(2x) + 1) would lose its digits."""
        b, lanes = self.builder, x.type.count
        square = b.fmul(x, x)
        series = self.constant(_TANH[-1], lanes)
        for coefficient in _TANH[-2::-1]:
            series = self.fma(series, square, self.constant(coefficient, lanes))
        series = self.fma(b.fmul(series, square), x, x)
        size = self.call("llvm.fabs", x)
        bounded = self.call("llvm.minnum", size, self.constant(20, lanes))
        power = self.exp2(b.fmul(bounded, self.constant(2 / np.log(2), lanes)))
        one = self.constant(1, lanes)
        far = b.fsub(one, b.fdiv(self.constant(2, lanes), b.fadd(power, one)))
        far = self.call("llvm.copysign", far, x)
        return b.select(b.fcmp_ordered("<", size, self.constant(0.625, lanes)), series, far)


_EXP2 = [float(np.log(2) ** n / np.prod(np.arange(1.0, n + 1))) for n in range(8)]

# tanh(x) = x + x³ P(x²) up to 0.625: the polynomial of the Cephes library (tanhf).
_TANH = [
    -3.33332819422e-1,
    1.33314422036e-1,
    -5.37397155531e-2,
    2.06390887954e-2,
    -5.70498872745e-3,
]


def _fold(span: int, lanes: int) -> tuple[list[int], list[int]]:
    """Of two vectors, groups of `span` lanes taken in turns: first of each pair, and second."""
    low = []
    for start in range(0, lanes, 2 * span):
        low += [*range(start, start + span), *range(lanes + start, lanes + start + span)]
    return low, [i + span for i in low]
