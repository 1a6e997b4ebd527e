"""Which tokens sequences have so far, and how often, kept where the logits lie.

What `token_counts` is on the host. Here a sequence is a row of two tensors::

    ids    [ 5 | 7 | 9 | -1 | -1 ]     distinct tokens, in the order in which they first came
    times  [ 0 | 1 | 1 |  0 |  0 ]     how often each is in the output

A token that a step says is counted from that step's own answer, on the device, before the next one
is chosen: so the host need not have read it. The host's counts stay what is true. A row is made of
them when its sequence has none, or when it was told of a token that the sequence did not say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.engine.device import uploaded
from pagedkv.engine.sampling import SamplerState
from pagedkv.engine.token_counts import TokenCounts
from pagedkv.engine.turn import Turn

_NOBODY = -1
_LEAST_ROOM = 64


@dataclass
class _Row:
    """The row of one sequence, and how many tokens of its output are counted there."""

    row: int
    num_tokens: int


@dataclass
class _News:
    """What the rows must be told before they are what is asked for."""

    made: list[tuple[int, TokenCounts]] = field(default_factory=list)
    """Rows to make of the host's counts."""
    known: list[tuple[int, int]] = field(default_factory=list)
    """(row, token)."""
    awaited: list[tuple[int, int]] = field(default_factory=list)
    """(row, place in what the step before says)."""


class DeviceCounts:
    """Rows of the sequences whose tokens were counted last; the others' are given away."""

    def __init__(self, device: torch.device) -> None:
        self._rows: dict[SamplerState, _Row] = {}
        self._free: list[int] = []
        self._ids = torch.empty((0, _LEAST_ROOM), dtype=torch.int64, device=device)
        self._times = torch.empty_like(self._ids)
        self._sizes = torch.empty(0, dtype=torch.int64, device=device)

    def forget(self, state: SamplerState) -> None:
        """The row of this sequence counts what it did not say: make it anew when it is needed."""
        held = self._rows.pop(state, None)
        if held is not None:
            self._free.append(held.row)

    def of(
        self, turns: Sequence[Turn], said: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Distinct tokens and how often each is in the output, int64 [n, width] both.

        Of all tokens before the one that is chosen; -1 and 0 behind a row's last. All `turns` have
        counts. `said` int64 [k]: what the step before says, for those that await it. Nothing waits
        for the device.
        """
        try:
            return self._of(turns, said)
        except BaseException:  # nobody knows how far it came
            self._rows.clear()
            self._free = list(range(len(self._ids)))
            raise

    def _of(
        self, turns: Sequence[Turn], said: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        counts = [turn.state.counts or TokenCounts() for turn in turns]
        width = 1 + max(len(one.token_ids) for one in counts)
        self._make_room(len(turns), width)
        present = {turn.state for turn in turns}
        for state in [state for state in self._rows if state not in present]:
            self.forget(state)
        news = _News()
        for turn, one in zip(turns, counts):
            self._note(turn, one, news)
        rows = [self._rows[turn.state].row for turn in turns]
        there = self._send(rows, news, said)
        for turn in turns:
            self._rows[turn.state].num_tokens = turn.position
        return self._ids[there, :width], self._times[there, :width]

    def _note(self, turn: Turn, counts: TokenCounts, news: _News) -> None:
        """What the row of `turn` must be told."""
        held = self._rows.get(turn.state)
        num_missing = -1 if held is None else turn.position - held.num_tokens
        if held is None or not 0 <= num_missing <= 1:
            if held is None:
                held = self._rows[turn.state] = _Row(self._free.pop(), 0)
            news.made.append((held.row, counts))
            num_missing = int(turn.awaits is not None)
        if not num_missing:
            return
        if turn.awaits is not None:
            news.awaited.append((held.row, turn.awaits))
        elif counts.newest is not None:
            news.known.append((held.row, counts.newest))

    def _send(self, rows: Sequence[int], news: _News, said: torch.Tensor | None) -> torch.Tensor:
        """Tell the rows their news, and give the numbers of `rows` on the device."""
        sizes = np.array([len(counts.token_ids) for _, counts in news.made], dtype=np.int64)
        made = np.array([row for row, _ in news.made], dtype=np.int64)
        starts = np.cumsum(sizes) - sizes
        parts = [
            np.array(rows, dtype=np.int64),
            np.array([*news.known, *news.awaited], dtype=np.int64).reshape(-1, 2).T,
            np.stack([made, sizes]),
            np.stack(
                [
                    np.repeat(made, sizes),
                    np.arange(sizes.sum()) - np.repeat(starts, sizes),
                    _together([counts.token_ids for _, counts in news.made]),
                    _together([counts.output_counts for _, counts in news.made]),
                ]
            ),
        ]
        there, (told, tokens), (fresh, fresh_sizes), (at, places, ids, times) = uploaded(
            parts, self._ids.device
        )
        if len(news.made):
            self._ids.index_fill_(0, fresh, _NOBODY)
            self._times.index_fill_(0, fresh, 0)
            self._sizes[fresh] = fresh_sizes
            self._ids[at, places] = ids
            self._times[at, places] = times
        if len(news.awaited):
            assert said is not None
            n = len(news.known)
            tokens = torch.cat([tokens[:n], said[tokens[n:]]])
        if len(tokens):
            self._count(told, tokens)
        return there

    def _count(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """One more of `tokens` int64 [m], each in a row of its own."""
        is_it = self._ids[rows] == tokens[:, None]
        is_there = is_it.any(1)
        sizes = self._sizes[rows]
        places = torch.where(is_there, is_it.int().argmax(1), sizes)
        self._ids[rows, places] = tokens
        self._times[rows, places] = self._times[rows, places] + 1
        self._sizes[rows] = sizes + ~is_there

    def _make_room(self, num_rows: int, width: int) -> None:
        old_rows, old_width = self._ids.shape
        if num_rows <= old_rows and width <= old_width:
            return
        rows = old_rows if num_rows <= old_rows else _room(num_rows)
        width = old_width if width <= old_width else _room(width)
        ids = self._ids.new_full((rows, width), _NOBODY)
        times = self._times.new_zeros((rows, width))
        sizes = self._sizes.new_zeros(rows)
        ids[:old_rows, :old_width] = self._ids
        times[:old_rows, :old_width] = self._times
        sizes[:old_rows] = self._sizes
        self._ids, self._times, self._sizes = ids, times, sizes
        self._free += range(old_rows, rows)


def _together(arrays: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, dtype=np.int64), *arrays])


def _room(size: int) -> int:
    return 1 << (size - 1).bit_length()
