"""Keys and values in the blocks of a GPU: `pagedkv.attention.KVStorage` for CUDA tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from triton import knobs

from pagedkv.attention.arrays import integers
from pagedkv.attention.gpu.arithmetic import LOG2_E
from pagedkv.attention.gpu.attending import attend_pieces
from pagedkv.attention.gpu.combining import combine_parts
from pagedkv.attention.gpu.copying import at_once, copy_pages
from pagedkv.attention.gpu.plan import (
    Attending,
    DecodePlan,
    Machine,
    Plan,
    PreparedLaunch,
    check_tokens,
)
from pagedkv.attention.gpu.tiles import FEWEST_ROWS, LayerKind, power_of_two, tiles_for
from pagedkv.attention.gpu.writing import write_rows
from pagedkv.attention.pages import LayerShape, Pages, check_options, check_plan, check_sinks
from pagedkv.errors import InvalidInput

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

LARGEST_DIM = 1024
"""Numbers in a key or a value; a larger tile does not fit a processor's shared memory."""

_OPTIONS = {"enable_fp_fusion": True}
"""Multiplying and adding in one instruction: what Triton does unasked changes with its release."""

_COPIED_NUMBERS = 8192
_COMBINED_PARTS = 16
_PROCESSORS_OF_NOTHING = 16
"""What the interpreter is planned for: so many that a few long contexts are cut."""


class _Writer(NamedTuple):
    """What writing to one layer is told each time."""

    key_start: int
    value_start: int
    """Where its keys and values begin in a page."""
    options: dict[str, Any]


class GPUStorage(Pages):
    """Keys and values of `num_blocks * block_size` tokens, in pages, on one device.

    The verbs, the layout of a page and the meaning of every argument are those of
    `pagedkv.attention.KVStorage`. Tensors are torch's, on the storage's device; block tables,
    lengths, query starts and copies come from the scheduler and are read on the host. Everything
    is queued on the current stream, nothing waits for the device, and so nothing that only the
    device knows is checked: a slot that does not exist is skipped.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        layers: Sequence[LayerShape],
        *,
        dtype: Any = "bfloat16",
        device: str | torch.device = "cuda",
    ) -> None:
        """`dtype` is "float32", "bfloat16" or "float16", or NumPy's or torch's dtype of that name.

        On the device "cpu" it works in Triton's interpreter only, to test with. Raises
        `InvalidInput`, also where the device has no room.
        """
        super().__init__(num_blocks, block_size, layers, dtype)
        for i, shape in enumerate(self.layers):
            if max(shape.key_dim, shape.value_dim) > LARGEST_DIM:
                raise InvalidInput(f"layer {i} has heads of more than {LARGEST_DIM} numbers")
        self.device = torch.device(device)
        if self.device.type == "cuda":
            if self.device.index is None:
                self.device = torch.device("cuda", torch.cuda.current_device())
            facts = torch.cuda.get_device_properties(self.device)
            num_processors = facts.multi_processor_count
            shared_bytes = facts.shared_memory_per_block_optin
        elif self.device.type == "cpu" and knobs.runtime.interpret:
            num_processors, shared_bytes = _PROCESSORS_OF_NOTHING, 227 * 1024
        else:
            raise InvalidInput(
                f"no Triton kernels run on {self.device}: give a CUDA device, or use "
                "pagedkv.attention.KVStorage"
            )
        is_half = self.dtype != "float32"
        for key_dim, value_dim in {(shape.key_dim, shape.value_dim) for shape in self.layers}:
            # Whether a program fits is better known now than in the first step.
            tiles_for(LayerKind(1, 1, key_dim, value_dim, 0, 0, is_half), shared_bytes)
        try:
            self.data = torch.empty(
                self.num_blocks,
                self._page_numbers,
                dtype=DTYPES[self.dtype],
                device=self.device,
            )
            """[num_blocks, numbers of a page], one contiguous tensor."""
        except RuntimeError as problem:  # torch.OutOfMemoryError is one
            raise InvalidInput(
                f"{self.device} has no room for {num_blocks} blocks of "
                f"{self.page_bytes} bytes: ask for fewer"
            ) from problem
        self._writers = [self._writer(layer) for layer in range(len(self.layers))]
        self._kinds: dict[LayerKind, None] = {}
        self._room = torch.empty(64, dtype=torch.float32, device=self.device)
        self._machine = Machine(
            self.device,
            self.num_blocks,
            self.block_size,
            num_processors,
            shared_bytes,
            self._room_for,
        )

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: Any) -> None:
        """Put the keys and values of new tokens into their slots.

        `k` [tokens, kv_heads, key_dim] and `v` [tokens, kv_heads, value_dim] in the storage's
        dtype or float32, which is rounded to nearest; any strides, but for a contiguous last
        axis, are read in place. `slots` int64 [tokens]; -1 is padding and writes nowhere. Slots
        on the device are taken as they are, and any that the storage does not have write nowhere;
        an array on the host is checked, and copied, at each call.

        Raises `InvalidInput` before anything is written.
        """
        shape = self._shape(layer)
        keys = self._rows(k, "k", shape.num_kv_heads, shape.key_dim)
        values = self._rows(v, "v", shape.num_kv_heads, shape.value_dim)
        there = self._slots(slots)
        num_tokens = there.shape[0]
        if not num_tokens == k.shape[0] == v.shape[0]:
            raise InvalidInput(
                f"{k.shape[0]} keys, {v.shape[0]} values and {num_tokens} slots: not as many"
            )
        if not num_tokens:
            return
        writer = self._writers[layer]
        key_token, key_head, _ = keys.stride()
        value_token, value_head, _ = values.stride()
        with self._current():
            write_rows[(num_tokens,)](
                self.data,
                keys,
                values,
                there,
                self.num_blocks * self.block_size,
                self._page_numbers,
                writer.key_start,
                writer.value_start,
                key_token,
                key_head,
                value_token,
                value_head,
                **writer.options,
            )

    def _writer(self, layer: int) -> _Writer:
        shape = self.layers[layer]
        heads = 1 << (shape.num_kv_heads - 1).bit_length()
        width = heads * power_of_two(max(shape.key_dim, shape.value_dim))
        key_start, value_start = self._places(layer)
        options = {
            "NUM_HEADS": shape.num_kv_heads,
            "BLOCK_SIZE": self.block_size,
            "KEY_DIM": shape.key_dim,
            "VALUE_DIM": shape.value_dim,
            "HEADS": heads,
            "KEYS": power_of_two(shape.key_dim),
            "VALUES": power_of_two(shape.value_dim),
            "num_warps": max(1, min(8, width // 256)),
            **_OPTIONS,
        }
        return _Writer(key_start, value_start, options)

    def copy_blocks(self, copies: Any) -> None:
        """Copy whole pages, `copies` int32 [n, 2] as (from, to), one after the other.

        `copies` is read on the host, the pages are copied on the device. Raises `InvalidInput`
        before anything is copied.
        """
        pairs = self._pairs(copies)
        grid_of_page = -(-self._page_numbers // _COPIED_NUMBERS)
        with self._current():
            for run in at_once(pairs):
                there = self._to_device(np.array(run, dtype=np.int64))
                copy_pages[(len(run), grid_of_page)](
                    self.data, there, self._page_numbers, NUMBERS=_COPIED_NUMBERS, num_warps=8,
                    **_OPTIONS,
                )  # fmt: skip

    def read(self, layer: int, block_table: Any, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of one sequence's first `length` tokens, as contiguous copies.

        `k` [length, kv_heads, key_dim] and `v` [length, kv_heads, value_dim], float32 on the
        device: to look at, and to test with.
        """
        shape = self._shape(layer)
        where, offsets = (
            torch.from_numpy(part).to(self.device) for part in self._tokens(block_table, length)
        )
        parts = []
        for start, dim in zip(self._places(layer), (shape.key_dim, shape.value_dim)):
            stop = start + shape.num_kv_heads * self.block_size * dim
            pages = self.data[:, start:stop].unflatten(1, (-1, self.block_size, dim))
            parts.append(pages[where, :, offsets].float())
        return parts[0], parts[1]

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        block_tables: Any,
        lengths: Any,
        query_starts: Any,
        *,
        scale: float | None = None,
        window: int | None = None,
        chunk: int | None = None,
        soft_cap: float | None = None,
        sinks: Any = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of new tokens over all tokens of their sequences, read through block tables.

        The arguments are those of `KVStorage.attend`: `q` [tokens, heads, key_dim] in the
        storage's dtype or float32, and `out`, if given, like it, with `value_dim`; `sinks`
        [heads], of any float dtype. Float32 queries over half-precision keys lose nothing, and
        are slow. Of a sequence the last bits may depend on the others of its batch, since the
        whole batch decides where contexts are cut.

        What no query may see is not read: unwritten slots may hold anything. Raises
        `InvalidInput` before anything is computed.
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
        """A batch for `attend_planned`, of any mix of decodes and prompts, for one step.

        Block tables int32 [sequences, width], lengths int64 [sequences] and query starts int64
        [sequences + 1] are NumPy's; they are read here, and must stay as they are while the plan
        is in use.
        """
        return Plan(block_tables, lengths, query_starts, machine=self._machine, kinds=self._kinds)

    def decode_plan(self, max_sequences: int, max_blocks_each: int) -> DecodePlan:
        """A plan to capture CUDA graphs with: every sequence asks with one token, its last.

        It has room for `max_sequences`, and for that many times `max_blocks_each` entries of
        block tables in all. Make those of the largest batches first: plans share the room for the
        parts of what is cut.
        """
        return DecodePlan(max_sequences, max_blocks_each, machine=self._machine, kinds=self._kinds)

    def attend_planned(
        self,
        layer: int,
        q: torch.Tensor,
        plan: Plan | DecodePlan,
        *,
        scale: float | None = None,
        window: int | None = None,
        chunk: int | None = None,
        soft_cap: float | None = None,
        sinks: Any = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`attend` with a batch of this storage that was planned before.

        What layers alike have in common is made for the first of them, and kept in the plan.
        """
        shape = self._shape(layer)
        check_plan(plan, self._machine)
        if q.stride(-1) != 1:
            q = q.contiguous()
        asked = (shape, q.shape, q.stride(), q.dtype, scale, window, chunk, soft_cap, sinks is None)
        attending = plan.attending.get(asked)
        if attending is None:
            attending = self._attending(shape, q, plan, scale, window, chunk, soft_cap, sinks)
            plan.attending[asked] = attending
        self._check_device(q, "q")
        dims = attending.dims
        if out is None:
            out = q.new_empty(dims)
        elif out.shape != dims or out.dtype != q.dtype or out.stride(2) != 1:
            raise InvalidInput(
                f"out must be {_name(q)} {list(dims)}, writable, with a contiguous last axis, "
                f"not {_name(out)} {list(out.shape)}"
            )
        ends = self._sinks(sinks, dims[1])
        if ends is None:
            ends = self._room  # which is not looked at
        if attending.sign <= 0:  # the kernel finds the largest score before it multiplies
            q = -q if attending.sign else torch.zeros_like(q)
        q_token, q_head, _ = q.stride()
        out_token, out_head, _ = out.stride()
        writer = self._writers[layer]
        parts, part_scores = attending.parts, attending.part_scores
        with self._current():
            for launch in attending.launches:
                attend_pieces[launch.grid](
                    out,
                    q,
                    self.data,
                    plan.tables,
                    launch.pieces,
                    ends,
                    parts,
                    part_scores,
                    q_token,
                    q_head,
                    out_token,
                    out_head,
                    self._page_numbers,
                    writer.key_start,
                    writer.value_start,
                    *attending.numbers,
                    **launch.options,
                )
                if launch.combining_grid[0]:
                    combine_parts[launch.combining_grid](
                        out,
                        launch.entries,
                        ends,
                        parts,
                        part_scores,
                        out_token,
                        out_head,
                        **launch.combining_options,
                    )
        return out

    def _attending(
        self,
        shape: LayerShape,
        q: torch.Tensor,
        plan: Plan | DecodePlan,
        scale: float | None,
        window: int | None,
        chunk: int | None,
        soft_cap: float | None,
        sinks: Any,
    ) -> Attending:
        """What layers of this shape and these options launch with `plan`."""
        heads_each = self._heads_each(q, shape)
        check_options(scale, window, chunk, soft_cap)
        num_tokens, num_heads, _ = q.shape
        check_tokens(plan, num_tokens)
        kind = LayerKind(
            shape.num_kv_heads,
            heads_each,
            shape.key_dim,
            shape.value_dim,
            window or 0,
            chunk or 0,
            q.dtype != torch.float32,
        )
        self._kinds.setdefault(kind)
        cut = plan.cut(kind)
        factor = shape.key_dim**-0.5 if scale is None else scale
        sign = (factor > 0) - (factor < 0)
        factor = abs(factor) if sign else 1.0
        factor, cap = (
            (factor / soft_cap, soft_cap * LOG2_E.value)
            if soft_cap
            else (factor * LOG2_E.value, 0.0)
        )
        of_layer = {
            "NUM_HEADS": shape.num_kv_heads,
            "HEADS_EACH": heads_each,
            "VALUE_DIM": shape.value_dim,
            "VALUES": power_of_two(shape.value_dim),
            "SINKS": sinks is not None,
            **_OPTIONS,
        }
        launches = []
        for launch in cut.launches:
            tile = launch.tile
            options = {
                **of_layer,
                "BLOCK_SIZE": self.block_size,
                "KEY_DIM": shape.key_dim,
                "KEYS": power_of_two(shape.key_dim),
                "ROWS": tile.rows,
                "TOKENS": tile.tokens,
                "STAGES": tile.num_stages,
                "ALL_MASKED": tile.rows == FEWEST_ROWS,
                "WINDOW": kind.window > 0,
                "CHUNK": kind.chunk > 0,
                "SOFT_CAP": soft_cap is not None,
                "PRECISION": "tf32" if kind.is_half else "ieee",
                "num_warps": tile.num_warps,
                "num_stages": tile.num_stages,
            }
            launches.append(
                PreparedLaunch(
                    (launch.pieces.shape[0] * shape.num_kv_heads,),
                    launch.pieces,
                    options,
                    (launch.entries.shape[0] * shape.num_kv_heads,),
                    launch.entries,
                    {**of_layer, "PARTS": _COMBINED_PARTS, "num_warps": 2},
                )
            )
        return Attending(
            (num_tokens, num_heads, shape.value_dim),
            sign,
            (factor, cap, kind.window, kind.chunk),
            cut.parts,
            cut.part_scores,
            tuple(launches),
        )

    def _heads_each(self, q: torch.Tensor, shape: LayerShape) -> int:
        """Query heads for each KV head."""
        if q.dtype not in (torch.float32, DTYPES[self.dtype]):
            raise InvalidInput(f"q is {_name(q)}: give {self._dtypes_taken}")
        if q.ndim != 3 or q.shape[2] != shape.key_dim:
            raise InvalidInput(f"q has shape {list(q.shape)}, not [tokens, heads, {shape.key_dim}]")
        heads, rest = divmod(int(q.shape[1]), shape.num_kv_heads)
        if rest or not heads:
            raise InvalidInput(f"{q.shape[1]} heads do not share {shape.num_kv_heads} KV heads")
        return heads

    def _rows(self, rows: torch.Tensor, name: str, heads: int, dim: int) -> torch.Tensor:
        """New keys or values in the storage's dtype, with a contiguous last axis."""
        dtype = self.data.dtype
        if rows.dtype not in (torch.float32, dtype):
            raise InvalidInput(f"{name} is {_name(rows)}: give {self._dtypes_taken}")
        shape = rows.shape
        if len(shape) != 3 or shape[1] != heads or shape[2] != dim:
            wanted = f"[tokens, {heads}, {dim}]"
            raise InvalidInput(f"{name} has shape {list(shape)}, not {wanted}")
        self._check_device(rows, name)
        if rows.dtype is not dtype:
            rows = rows.to(dtype)
        return rows if rows.stride(2) == 1 else rows.contiguous()

    def _slots(self, slots: Any) -> torch.Tensor:
        if isinstance(slots, torch.Tensor):
            if slots.dtype != torch.int64:
                raise InvalidInput(f"slots must be int64, not {_name(slots)}")
            self._check_device(slots, "slots")
            return slots.contiguous()
        numbers = integers(slots, "slots")
        num_slots = self.num_blocks * self.block_size
        bad = np.flatnonzero((numbers < -1) | (numbers >= num_slots))
        if len(bad):
            raise InvalidInput(
                f"slots[{bad[0]}] is {numbers[bad[0]]}: this storage has slots 0 to "
                f"{num_slots - 1}, and -1 for padding"
            )
        return self._to_device(numbers)

    def _sinks(self, sinks: Any, num_heads: int) -> torch.Tensor | None:
        if sinks is None:
            return None
        if not isinstance(sinks, torch.Tensor):
            scores = np.asarray(sinks, dtype=np.float32)
            check_sinks(scores)
            sinks = torch.as_tensor(scores).to(self.device)
        if sinks.shape != (num_heads,):
            raise InvalidInput(f"sinks has shape {list(sinks.shape)}, not [{num_heads}]")
        self._check_device(sinks, "sinks")
        return sinks.contiguous()

    def _check_device(self, tensor: torch.Tensor, name: str) -> None:
        if tensor.device != self.device:
            raise InvalidInput(f"{name} is on {tensor.device}: this storage is on {self.device}")

    def _to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    def _current(self) -> Any:
        """Within, Triton launches on this storage's device."""
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            return torch.cuda.device(self.device)
        return nullcontext()

    def _room_for(self, size: int) -> torch.Tensor:
        """Room that everything uses that runs one after the other; plans keep what they got."""
        if len(self._room) < size:
            self._room = torch.empty(size, dtype=torch.float32, device=self.device)
        return self._room


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
