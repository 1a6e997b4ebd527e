"""Keys and values in the memory of a CPU, in pages, and attention that reads them there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba.core import config
from numpy.typing import NDArray

from pagedkv.attention import arguments, writing
from pagedkv.attention.arrays import (
    Flat,
    aligned,
    flat,
    integers,
    is_readable_in_place,
    native,
)
from pagedkv.attention.kernels import kernel as kernel_for
from pagedkv.attention.pages import (
    LayerShape,
    Pages,
    check_options,
    check_plan,
    check_sinks,
    integer,
)
from pagedkv.attention.plan import LayerKind, Plan
from pagedkv.attention.threads import Threads, num_cpus
from pagedkv.attention.tiles import fits_tiles
from pagedkv.attention.vector_code import BFLOAT16, FLOAT16
from pagedkv.errors import InvalidInput

DTYPES = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}
"""As what NumPy sees the numbers of a storage: bfloat16 as its bits."""

_BY_ADDRESSES = not (config.DISABLE_JIT or config.BOUNDSCHECK)
"""Whether kernels run in threads that know only addresses; else one thread takes arrays."""

_LOG2_E = float(np.log2(np.e))


class KVStorage(Pages):
    """Keys and values of `num_blocks * block_size` tokens, in pages.

    The memory is taken from the system when it is first written, page by page.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        layers: Sequence[LayerShape],
        *,
        dtype: Any = "float32",
        num_threads: int | None = None,
    ) -> None:
        """`dtype` is "float32", "bfloat16" or "float16", or NumPy's or torch's dtype of that name.

        `num_threads` share the work of an `attend`: as many as there are CPUs unless given.
        Raises `InvalidInput`, also where the system will not promise so much memory.

        >>> storage = KVStorage(3, 16, [LayerShape(2, 64, 64)] * 4)
        >>> storage.bytes_per_token, storage.page_bytes, storage.nbytes
        (4096, 65536, 196608)
        """
        super().__init__(num_blocks, block_size, layers, dtype)
        num_threads = num_cpus() if num_threads is None else integer("num_threads", num_threads)
        if num_threads < 1:
            raise InvalidInput(f"num_threads must be at least 1, not {num_threads}")
        self._num_threads = num_threads if _BY_ADDRESSES else 1
        self._threads = Threads(self._num_threads)
        self._half = {"float32": 0, "bfloat16": BFLOAT16, "float16": FLOAT16}[self.dtype]
        self.data = self._reserve(DTYPES[self.dtype])
        """[num_blocks, numbers of a page], one contiguous array; bfloat16 as uint16 bits."""
        bits = self.data.view(np.uint16) if self.dtype == "float16" else self.data
        self._numbers = bits.reshape(-1)

    def _reserve(self, dtype: Any) -> NDArray[Any]:
        try:
            pages = aligned(self.num_blocks * self._page_numbers, dtype)
        except (MemoryError, ValueError):  # more than there is, more than can be counted
            nbytes = self.num_blocks * self._page_numbers * np.dtype(dtype).itemsize
            raise InvalidInput(
                f"the system does not promise {nbytes} bytes for {self.num_blocks} blocks: "
                "ask for fewer"
            ) from None
        return pages.reshape(self.num_blocks, -1)

    def write(self, layer: int, k: Any, v: Any, slots: Any) -> None:
        """Put the keys and values of new tokens into their slots.

        `k` [tokens, kv_heads, key_dim] and `v` [tokens, kv_heads, value_dim] in the storage's
        dtype or float32, which is rounded to nearest; `slots` int64 [tokens], where -1 is padding
        and writes nowhere. NumPy arrays and torch tensors are read where they lie.

        Raises `InvalidInput` before anything is written.
        """
        shape = self._shape(layer)
        keys = self._flat_input(k, "k", (shape.num_kv_heads, shape.key_dim))
        values = self._flat_input(v, "v", (shape.num_kv_heads, shape.value_dim))
        slots = integers(slots, "slots")
        if not len(slots) == len(k) == len(v):
            raise InvalidInput(
                f"{len(k)} keys, {len(v)} values and {len(slots)} slots: not as many"
            )
        key_start, value_start = self._places(layer)
        bad = writing.write(
            self._numbers,
            self._page_numbers,
            self.block_size,
            self.num_blocks,
            shape.num_kv_heads,
            key_start,
            shape.key_dim,
            *keys,
            value_start,
            shape.value_dim,
            *values,
            slots,
            self._half,
        )
        if bad >= 0:
            raise InvalidInput(
                f"slots[{bad}] is {slots[bad]}: this storage has slots 0 to "
                f"{self.num_blocks * self.block_size - 1}, and -1 for padding"
            )

    def copy_blocks(self, copies: Any) -> None:
        """Copy whole pages, `copies` int32 [n, 2] as (from, to), one after the other.

        Raises `InvalidInput` before anything is copied.
        """
        for source, target in self._pairs(copies):
            self.data[target] = self.data[source]

    def read(
        self, layer: int, block_table: Any, length: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The keys and values of one sequence's first `length` tokens, as contiguous copies.

        `k` [length, kv_heads, key_dim] and `v` [length, kv_heads, value_dim], float32: to look
        at, and to test with. `block_table` [width], anything behind its last block.

        Raises `InvalidInput`.
        """
        shape = self._shape(layer)
        blocks, offsets = self._tokens(block_table, length)
        parts = []
        for start, dim in zip(self._places(layer), (shape.key_dim, shape.value_dim)):
            stop = start + shape.num_kv_heads * self.block_size * dim
            pages = self.data[:, start:stop]
            rows = pages.reshape(self.num_blocks, shape.num_kv_heads, self.block_size, dim)
            parts.append(_as_float32(rows[blocks, :, offsets], self.dtype))
        return parts[0], parts[1]

    def attend(
        self,
        layer: int,
        q: Any,
        block_tables: Any,
        lengths: Any,
        query_starts: Any,
        *,
        scale: float | None = None,
        window: int | None = None,
        chunk: int | None = None,
        soft_cap: float | None = None,
        sinks: Any = None,
        out: Any = None,
    ) -> Any:
        """Attention of new tokens over all tokens of their sequences, read through block tables.

        A batch may mix chunks of prompts and single tokens: sequence `i` asks with the queries
        `query_starts[i]` to `query_starts[i + 1]` (half open), its last tokens, whose keys and
        values are written already.

        - `q` [tokens, heads, key_dim], float32 or the storage's dtype; `heads` is a multiple of
          the layer's KV heads, and head `h` uses KV head `h // (heads // kv_heads)`;
        - `block_tables` int32 [sequences, width], anything behind a sequence's last block;
        - `lengths` int64 [sequences], tokens of each sequence, the new ones included;
        - `query_starts` int64 [sequences + 1];
        - `scale` of the scores, `key_dim ** -0.5` unless given;
        - `window`: a token attends to itself and the `window - 1` before it;
        - `chunk`: a token attends only within its own chunk of so many tokens; with `window`
          too, to what both let it see;
        - `soft_cap`: scores become `soft_cap * tanh(score / soft_cap)`;
        - `sinks` [heads]: one more score for each head, whose value is nothing; -inf is none;
        - `out` [tokens, heads, value_dim] of `q`'s dtype is written where it is given.

        Returns `out`, or a new array or tensor like `q`. The result of a sequence does not depend
        on the others of the batch, nor on the number of threads. What no query may see is not
        read: unwritten slots may hold anything. Raises `InvalidInput` before anything is computed.
        """
        plan = self.plan(block_tables, lengths, query_starts)
        return self.attend_planned(
            layer,
            q,
            plan,
            scale=scale,
            window=window,
            chunk=chunk,
            soft_cap=soft_cap,
            sinks=sinks,
            out=out,
        )

    def plan(self, block_tables: Any, lengths: Any, query_starts: Any) -> Plan:
        """A batch for `attend_planned`, so that many layers need not look at it again.

        The arrays are those of `attend`, and must stay as they are while the plan is in use.
        """
        return Plan(
            block_tables,
            lengths,
            query_starts,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            most_threads=self._num_threads,
            made_for=self,
        )

    def attend_planned(
        self,
        layer: int,
        q: Any,
        plan: Plan,
        *,
        scale: float | None = None,
        window: int | None = None,
        chunk: int | None = None,
        soft_cap: float | None = None,
        sinks: Any = None,
        out: Any = None,
    ) -> Any:
        """`attend` with a batch of this storage that was planned before, one call at a time."""
        shape = self._shape(layer)
        check_plan(plan, self)
        queries, q_dtype = native(q, "q")
        heads = self._check_queries(queries, q_dtype, shape)
        check_options(scale, window, chunk, soft_cap)
        if not is_readable_in_place(queries):
            queries = np.array(queries, order="C")
        dims = (queries.shape[0], queries.shape[1], shape.value_dim)
        if out is None:
            out = q.new_empty(dims) if hasattr(q, "new_empty") else np.empty(dims, queries.dtype)
        target, out_dtype = native(out, "out")
        if target.shape != dims or out_dtype != q_dtype or not is_readable_in_place(target):
            raise InvalidInput(
                f"out must be {q_dtype} {list(dims)}, writable, with a contiguous last axis, "
                f"not {out_dtype} {list(target.shape)}"
            )
        ends = _sinks(sinks, dims[1])
        cut = plan.cut(
            dims[0],
            LayerKind(
                shape.num_kv_heads, heads, shape.key_dim, shape.value_dim, window or 0, chunk or 0
            ),
        )
        if cut is None:
            return out
        factor = (shape.key_dim**-0.5 if scale is None else scale) * _LOG2_E
        if soft_cap is not None:
            factor /= _LOG2_E * soft_cap
        cut.factors[:] = factor, (soft_cap or 0) * _LOG2_E
        nbytes = queries.itemsize
        q_token, q_head, _ = queries.strides
        out_token, out_head, _ = target.strides
        cut.integers[: arguments.WINDOW] = (
            self._page_numbers,
            self.block_size,
            *self._places(layer),
            q_token // nbytes,
            q_head // nbytes,
            out_token // nbytes,
            out_head // nbytes,
        )
        cut.counters.fill(0)
        half_queries = q_dtype != "float32"
        sizes = shape.key_dim, shape.value_dim
        is_tiled = fits_tiles(self._half, half_queries, *sizes, factor)
        kernel = kernel_for(heads, *sizes, self._half, half_queries, is_tiled)
        if not _BY_ADDRESSES:
            arrays = dict(cut.arrays)
            arrays[arguments.STORAGE], arrays[arguments.SINKS] = self._numbers, ends
            arrays[arguments.Q], arrays[arguments.OUT] = flat(queries).numbers, flat(target).numbers
            kernel.take(*(arrays[i] for i in range(len(arrays))))
            return out
        numbers = cut.numbers
        for place, array in (
            (arguments.STORAGE, self._numbers),
            (arguments.Q, queries),
            (arguments.OUT, target),
            (arguments.SINKS, ends),
        ):
            numbers[2 * place], numbers[2 * place + 1] = array.ctypes.data, array.size
        self._threads.run(kernel.task, numbers, cut.num_threads)
        return out

    def _check_queries(self, q: NDArray[Any], dtype: str, shape: LayerShape) -> int:
        """Query heads for each KV head."""
        if dtype not in ("float32", self.dtype):
            raise InvalidInput(f"q is {dtype}: give {self._dtypes_taken}")
        if q.ndim != 3 or q.shape[2] != shape.key_dim:
            raise InvalidInput(f"q has shape {list(q.shape)}, not [tokens, heads, {shape.key_dim}]")
        heads, rest = divmod(int(q.shape[1]), shape.num_kv_heads)
        if rest or not heads:
            raise InvalidInput(f"{q.shape[1]} heads do not share {shape.num_kv_heads} KV heads")
        return heads

    def _flat_input(self, array: Any, name: str, row: tuple[int, int]) -> Flat:
        numbers, dtype = native(array, name)
        if dtype not in ("float32", self.dtype):
            raise InvalidInput(f"{name} is {dtype}: give {self._dtypes_taken}")
        if numbers.ndim != 3 or numbers.shape[1:] != row:
            wanted = f"[tokens, {row[0]}, {row[1]}]"
            raise InvalidInput(f"{name} has shape {list(numbers.shape)}, not {wanted}")
        if not is_readable_in_place(numbers):
            numbers = np.array(numbers, order="C")
        return flat(numbers)


def _sinks(sinks: Any, num_heads: int) -> NDArray[np.float32]:
    """One score a head, as powers of two; empty without sinks."""
    if sinks is None:
        return np.empty(0, dtype=np.float32)
    scores, dtype = native(sinks, "sinks")
    if scores.shape != (num_heads,):
        raise InvalidInput(f"sinks has shape {list(scores.shape)}, not [{num_heads}]")
    if dtype == "bfloat16":
        scores = _as_float32(scores, dtype)
    check_sinks(scores)
    return (scores * _LOG2_E).astype(np.float32)


def _as_float32(numbers: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    if dtype == "bfloat16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float32)
