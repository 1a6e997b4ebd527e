"""The batch of one step on the device: packed block tables, and its pieces for each kind of layer.

All of it is computed on the host and crosses in one copy that nobody waits for. A `Plan` is made
for one step; a `DecodePlan` keeps its place and its sizes from step to step, so that a CUDA graph
captured with it reads each new batch where it read the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.attention.arrays import batch_arrays
from pagedkv.attention.gpu import pieces
from pagedkv.attention.gpu.tiles import LayerKind, Tile, tiles_for
from pagedkv.attention.work import GOOD, problem, wrong_queries
from pagedkv.errors import InvalidInput

_ALIGNED = 4
"""Arrays begin at a fourth int32: Triton compiles again for addresses that 16 does not divide."""


@dataclass(frozen=True)
class Machine:
    """What a plan must know of a storage and its device."""

    device: torch.device
    num_blocks: int
    block_size: int
    num_processors: int
    """Streaming multiprocessors."""
    shared_bytes: int
    """Memory that a program may share."""
    room_for: Callable[[int], torch.Tensor]
    """Room for so many float32, shared by all that the device does one after the other."""

    def tiles(self, kind: LayerKind) -> tuple[Tile, ...]:
        return tiles_for(kind, self.shared_bytes)

    def most_extra(self, kind: LayerKind, tile: Tile) -> int:
        """Pieces that cutting contexts may add to a batch: three rounds of the device."""
        return -(-3 * self.num_processors * tile.programs_each // kind.num_kv_heads)


@dataclass(frozen=True)
class Launch:
    """Pieces of one tile size on the device, and the rows to put together after them."""

    tile: Tile
    pieces: torch.Tensor
    """int32 [n, pieces.COLUMNS]"""
    entries: torch.Tensor
    """int32 [n, pieces.ENTRY_COLUMNS]"""


@dataclass(frozen=True)
class Cut:
    """A batch in pieces for one kind of layer."""

    launches: tuple[Launch, ...]
    parts: torch.Tensor
    """float32 [places * kv_heads * value_dim]"""
    part_scores: torch.Tensor
    """float32 [places * kv_heads]"""


class PreparedLaunch(NamedTuple):
    """A kernel's launch, and that which puts its parts together, but for what a layer brings."""

    grid: tuple[int]
    pieces: torch.Tensor
    options: dict[str, Any]
    combining_grid: tuple[int]
    """Of 0 programs where nothing was cut."""
    entries: torch.Tensor
    combining_options: dict[str, Any]


class Attending(NamedTuple):
    """How layers that are alike attend with a plan: made by the storage, kept by the plan."""

    dims: tuple[int, int, int]
    """Of the result: tokens, heads, value_dim."""
    sign: int
    """Of the scale."""
    numbers: tuple[float, float, int, int]
    """What every row's scores are multiplied with, soft cap, window, chunk."""
    parts: torch.Tensor
    part_scores: torch.Tensor
    launches: tuple[PreparedLaunch, ...]


@dataclass(frozen=True)
class _HostCut:
    """A `Cut` before it crosses; `places` rows of parts are kept at a time."""

    tiles: tuple[Tile, ...]
    arrays: tuple[NDArray[np.int32], ...]
    """For each tile its pieces and its entries."""
    places: int

    def on_device(self, there: Iterable[torch.Tensor], kind: LayerKind, machine: Machine) -> Cut:
        arrays = list(there)
        launches = [
            Launch(tile, arrays[2 * i], arrays[2 * i + 1]) for i, tile in enumerate(self.tiles)
        ]
        scores = self.places * kind.num_kv_heads
        numbers = scores * kind.value_dim
        room = machine.room_for(numbers + scores)
        return Cut(tuple(launches), room[:numbers], room[numbers : numbers + scores])


class _Batch:
    """Block tables, lengths and query starts on the host, checked for each kind of layer."""

    def __init__(self, block_tables: Any, lengths: Any, query_starts: Any) -> None:
        self.tables, self.lengths, self.starts = batch_arrays(block_tables, lengths, query_starts)

    def check(self, machine: Machine, window: int, chunk: int) -> None:
        status, sequence = pieces.check(
            self.tables,
            self.lengths,
            self.starts,
            machine.num_blocks,
            machine.block_size,
            window,
            chunk,
        )
        if status != GOOD:
            raise InvalidInput(problem(status, sequence, machine.block_size, machine.num_blocks))

    def packed_into(self, packed: NDArray[np.int32], block_size: int) -> None:
        pieces.pack_tables(self.tables, self.lengths, self.starts, block_size, packed)

    def num_packed(self, block_size: int) -> int:
        return int(pieces.num_packed(self.lengths, self.starts, block_size))

    def cut(self, kind: LayerKind, machine: Machine) -> _HostCut:
        self.check(machine, kind.window, kind.chunk)
        tiles: list[Tile] = []
        arrays: list[NDArray[np.int32]] = []
        most_places = least_rows = 0
        of_kind = machine.tiles(kind)
        for tile in of_kind:
            made, entries, places = pieces.cut(
                self.lengths,
                self.starts,
                machine.block_size,
                kind.num_kv_heads,
                kind.heads_each,
                kind.window,
                kind.chunk,
                least_rows,
                tile.rows if tile is not of_kind[-1] else -tile.rows,
                tile.tokens,
                machine.num_processors * tile.programs_each,
                machine.most_extra(kind, tile),
            )
            least_rows = tile.rows
            if len(made):
                tiles.append(tile)
                arrays += made, entries
                most_places = max(most_places, places)
        return _HostCut(tuple(tiles), tuple(arrays), most_places)


class Plan:
    """Block tables, lengths and query starts of a batch, for any number of layers of a storage.

    Made by `GPUStorage.plan`, for one step. The arrays given must stay as they are for as long as
    it is used. Pieces for the kinds of layer that the storage has met before cross together with
    the block tables; those of a new kind when its first layer attends.
    """

    def __init__(
        self,
        block_tables: Any,
        lengths: Any,
        query_starts: Any,
        *,
        machine: Machine,
        kinds: Iterable[LayerKind],
    ) -> None:
        self.made_for = self._machine = machine
        self.attending: dict[tuple[Any, ...], Attending] = {}
        """By all that layers alike have in common; the storage's."""
        self._batch = batch = _Batch(block_tables, lengths, query_starts)
        made = {kind: batch.cut(kind, machine) for kind in kinds}
        batch.check(machine, 1, 0)
        self.num_tokens = int(batch.starts[-1])
        """Queries of the batch."""
        arrays = [array for cut in made.values() for array in cut.arrays]
        packed = np.empty(batch.num_packed(machine.block_size), dtype=np.int32)
        batch.packed_into(packed, machine.block_size)
        *there, self.tables = _upload([*arrays, packed], machine.device)
        """int32, on the device: the blocks of one sequence after the other."""
        left = iter(there)
        self._cuts = {
            kind: cut.on_device([next(left) for _ in cut.arrays], kind, machine)
            for kind, cut in made.items()
        }

    def cut(self, kind: LayerKind) -> Cut:
        """The batch in pieces for one kind of layer."""
        if kind not in self._cuts:
            cut = self._batch.cut(kind, self._machine)
            there = _upload(list(cut.arrays), self._machine.device)
            self._cuts[kind] = cut.on_device(there, kind, self._machine)
        return self._cuts[kind]


class _FixedCut:
    """Room on the device for one kind of layer, whatever the batch of up to so many decodes."""

    def __init__(self, kind: LayerKind, machine: Machine, max_sequences: int) -> None:
        self.kind = kind
        tiles = machine.tiles(kind)
        fitting = [tile for tile in tiles if tile.rows >= kind.heads_each]
        self.tile = fitting[0] if fitting else tiles[-1]
        self.tiles_each = -(-kind.heads_each // self.tile.rows)
        groups = max_sequences * self.tiles_each
        extra = machine.most_extra(kind, self.tile)
        rows = min(kind.heads_each, self.tile.rows)
        self.num_pieces = groups + extra
        # Whoever is cut has at least one piece more than uncut, so no more than `extra` are.
        self.num_entries = min(groups, extra) * rows
        self.places = min(self.num_pieces, 2 * extra) * rows
        self.sizes = self.num_pieces * pieces.COLUMNS, self.num_entries * pieces.ENTRY_COLUMNS

    def fill(
        self,
        batch: _Batch,
        machine: Machine,
        max_sequences: int,
        room: tuple[NDArray[np.int32], NDArray[np.int32]],
    ) -> None:
        """The batch's pieces and entries, into `room`, which is all zeros.

        Zeros are what does nothing; pieces for the padding make its results zeros.
        """
        made = batch.cut(self.kind, machine)
        own_pieces = room[0].reshape(self.num_pieces, pieces.COLUMNS)
        own_entries = room[1].reshape(self.num_entries, pieces.ENTRY_COLUMNS)
        num_pieces = 0
        if made.tiles:
            num_pieces = len(made.arrays[0])
            own_pieces[:num_pieces] = made.arrays[0]
            own_entries[: len(made.arrays[1])] = made.arrays[1]
        padding = np.arange(len(batch.lengths), max_sequences, dtype=np.int32)
        heads_each, rows = self.kind.heads_each, self.tile.rows
        for first_row in range(0, heads_each, rows):
            padded = own_pieces[num_pieces : num_pieces + len(padding)]
            padded[:, pieces.TOKEN] = padding
            padded[:, pieces.FIRST_ROW] = first_row
            padded[:, pieces.NUM_ROWS] = min(rows, heads_each - first_row)
            padded[:, pieces.PLACE] = -1
            num_pieces += len(padding)

    def on_device(self, there: list[torch.Tensor], machine: Machine) -> Cut:
        pieces_there = there[0].view(self.num_pieces, pieces.COLUMNS)
        entries_there = there[1].view(self.num_entries, pieces.ENTRY_COLUMNS)
        scores = self.places * self.kind.num_kv_heads
        numbers = scores * self.kind.value_dim
        room = machine.room_for(numbers + scores)
        return Cut(
            (Launch(self.tile, pieces_there, entries_there),),
            room[:numbers],
            room[numbers : numbers + scores],
        )


class _Region:
    """One array on the device, and the parts of it that some kinds of layer use."""

    def __init__(self, cuts: list[_FixedCut], room_behind: int, machine: Machine) -> None:
        self.cuts = cuts
        self.starts = [0]
        for cut in cuts:
            for size in cut.sizes:
                self.starts.append(self.starts[-1] + _aligned(size))
        with torch.inference_mode(False):  # else it could only be updated in that mode
            self.there = torch.zeros(
                self.starts[-1] + room_behind, dtype=torch.int32, device=machine.device
            )

    def views(self, array: Any, index: int) -> list[Any]:
        """Pieces and entries of the `index`th kind within `array`, which is laid out as this."""
        places = self.starts[2 * index : 2 * index + 2]
        return [array[start : start + size] for start, size in zip(places, self.cuts[index].sizes)]


class DecodePlan:
    """A plan of fixed size in a fixed place, for steps in which every sequence asks once.

    Made by `GPUStorage.decode_plan`, for the batch size that a CUDA graph is captured at.
    `attend_planned` with it launches the same grids on the same addresses whatever batch it was
    last told of; `update` tells it of the next one, in place::

        plan = storage.decode_plan(max_sequences=64, max_blocks_each=256)
        with torch.cuda.graph(graph):
            ...  storage.attend_planned(layer, q, plan, out=out)  ...
        for each step:
            plan.update(block_tables, lengths)
            graph.replay()

    `q` has `max_sequences` tokens, one a sequence; the results of those beyond the batch are
    zeros. Run once with the plan what is to be captured: that compiles the kernels, and makes the
    plan's room for kinds of layer that the storage has not met. What `update` copies is ordered,
    as any copy, on the current stream: replay there. The host need not wait between two updates.
    """

    def __init__(
        self,
        max_sequences: int,
        max_blocks_each: int,
        *,
        machine: Machine,
        kinds: Iterable[LayerKind],
    ) -> None:
        if max_sequences < 1 or max_blocks_each < 1:
            raise InvalidInput(
                f"a plan for {max_sequences} sequences of {max_blocks_each} blocks holds nothing: "
                "give at least 1 and 1"
            )
        self.max_sequences = max_sequences
        self.max_blocks_each = max_blocks_each
        self.made_for = self._machine = machine
        self.attending: dict[tuple[Any, ...], Attending] = {}
        """By all that layers alike have in common; the storage's."""
        known = [_FixedCut(kind, machine, max_sequences) for kind in kinds]
        first = _Region(known, max_sequences * max_blocks_each, machine)
        self._regions = [first]
        self.tables = first.there[first.starts[-1] :]
        """int32, on the device: the blocks of one sequence after the other."""
        self._cuts = {
            cut.kind: cut.on_device(first.views(first.there, i), machine)
            for i, cut in enumerate(known)
        }
        self.update(np.empty((0, 1), dtype=np.int32), np.empty(0, dtype=np.int64))

    @property
    def num_tokens(self) -> int:
        """Queries of a batch, padding included."""
        return self.max_sequences

    def update(self, block_tables: Any, lengths: Any) -> None:
        """The batch that whatever runs next attends with; the arrays are free for other use then.

        `block_tables` int32 [sequences, width] and `lengths` int64 [sequences], NumPy's, of at
        most `max_sequences`; sequence `i` asks with token `i` of `q`, its last. Raises
        `InvalidInput` with the plan as it was.
        """
        starts = np.arange(len(lengths) + 1)
        batch = _Batch(block_tables, lengths, starts)
        if len(batch.lengths) > self.max_sequences:
            raise InvalidInput(
                f"{len(batch.lengths)} sequences: this plan has room for {self.max_sequences}"
            )
        batch.check(self._machine, 1, 0)
        block_size = self._machine.block_size
        num_packed = batch.num_packed(block_size)
        if num_packed > len(self.tables):
            raise InvalidInput(
                f"the sequences have {num_packed} blocks: this plan has room for "
                f"{self.max_sequences} times {self.max_blocks_each}"
            )
        filled = [self._filled(region, batch) for region in self._regions]
        own = _pinned(self._regions[0].starts[-1] + num_packed, self._machine.device)
        own.numpy()[: len(filled[0])] = filled[0]
        batch.packed_into(own.numpy()[len(filled[0]) :], block_size)
        self._regions[0].there[: len(own)].copy_(own, non_blocking=True)
        for region, numbers in zip(self._regions[1:], filled[1:]):
            self._send(region, numbers)
        # What a layer of a new kind needs; the tables are on the device already.
        self._batch = batch

    def cut(self, kind: LayerKind) -> Cut:
        """The batch in pieces for one kind of layer."""
        if kind not in self._cuts:
            if self._machine.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise InvalidInput(
                    f"a layer of a new kind, {kind}, attends while a graph is captured: "
                    "run all layers once with this plan before"
                )
            fixed = _FixedCut(kind, self._machine, self.max_sequences)
            region = _Region([fixed], 0, self._machine)
            self._send(region, self._filled(region, self._batch))
            self._regions.append(region)
            self._cuts[kind] = fixed.on_device(region.views(region.there, 0), self._machine)
        return self._cuts[kind]

    def _filled(self, region: _Region, batch: _Batch) -> NDArray[np.int32]:
        numbers = np.zeros(region.starts[-1], dtype=np.int32)
        for i, cut in enumerate(region.cuts):
            own_pieces, own_entries = region.views(numbers, i)
            cut.fill(batch, self._machine, self.max_sequences, (own_pieces, own_entries))
        return numbers

    def _send(self, region: _Region, numbers: NDArray[np.int32]) -> None:
        own = _pinned(len(numbers), self._machine.device)
        own.numpy()[:] = numbers
        region.there.copy_(own, non_blocking=True)


def check_tokens(plan: Plan | DecodePlan, num_tokens: int) -> None:
    """Raise `InvalidInput` unless there are as many queries as the plan has."""
    if num_tokens == plan.num_tokens:
        return
    if isinstance(plan, DecodePlan):
        raise InvalidInput(f"q has {num_tokens} tokens: this plan is for {plan.num_tokens}")
    raise InvalidInput(wrong_queries(num_tokens, plan.num_tokens))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _pinned(size: int, device: torch.device) -> torch.Tensor:
    """int32 on the host, from where a device copies by itself.

    torch keeps such memory, and gives it out again only after the copies from it have ended.
    """
    return torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")


def _upload(arrays: list[NDArray[np.int32]], device: torch.device) -> list[torch.Tensor]:
    """`arrays` on the device, in one copy that nobody waits for."""
    starts = np.cumsum([0, *(_aligned(array.size) for array in arrays)]).tolist()
    own = _pinned(starts[-1], device)
    numbers = own.numpy()
    for start, array in zip(starts, arrays):
        numbers[start : start + array.size] = array.reshape(-1)
    there = own.to(device, non_blocking=True) if device.type == "cuda" else own
    return [
        there[start : start + array.size].view(array.shape) for start, array in zip(starts, arrays)
    ]
