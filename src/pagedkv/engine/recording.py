"""A run, written down so that the simulator can repeat it: `docs/recording.md`.

One line a sample, in the plain format of the simulator's traces: when its request came, how long
it was, and what it has in common with others, as keys of its pieces. Never token ids or text:
the keys are those of `memory.block_key` under a secret of the recording's own, which is thrown
away with it. They tell who shares a prefix with whom, and nothing about what it says.

A request is written whole when it ends. Until then lines of progress say how far all that are
under way have come, at most a second apart, so that whatever ends the process takes no more than
the last second with it. They also tell how long each step took, and how much it computed and read:
what the simulator needs to time the steps of this very machine. Each piece is written with one
call, in compressed files as a frame of its own, for the same reason.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from pagedkv.compiling import compiled_in_place
from pagedkv.errors import InvalidInput
from pagedkv.memory.block_key import Namespace, block_key, root_key
from pagedkv.memory.block_table import blocks_for
from pagedkv.scheduling.step_work import step_work

FINEST = 8
"""Tokens that a key stands for, at most: a replay is exact at block sizes that are a multiple."""

LONGEST_GAP_S = 1.0
"""How far apart lines of progress are while anybody is under way, unless one step takes longer."""


@dataclass(frozen=True)
class Arrival:
    """A request that came: what `Recorder.ended` wants back when it ends."""

    number: int
    """Requests that came before it."""
    s: float
    step: int
    root: NDArray[np.uint64]
    """The key before the first piece, uint64 [2]: that of its namespace."""
    is_shared: bool


@dataclass(frozen=True)
class Cut:
    """What ended a sample before its time. Steps are counted from 0."""

    step: int
    """The step before which it was cancelled, or the one that failed."""
    by_failure: bool = False


@dataclass(frozen=True)
class Answer:
    """One sample of a request: its place, and its tokens without those of the prompt."""

    sample: int
    token_ids: Sequence[int]
    cut: Cut | None = None
    has_ended: bool = True
    first_token_s: float | None = None
    """When there was a first one, in seconds since the engine began."""


@dataclass(frozen=True)
class UnderWay:
    """A request that has not ended, with all of its answers so far."""

    arrival: Arrival
    prompt_ids: Sequence[int]
    answers: Sequence[Answer]


_WORK = ("prefill_tokens", "decode_tokens", "context_tokens", "pairs")
"""What `step_work` counts, by the names that a line of progress has for it."""

_Key: TypeAlias = NDArray[np.uint64] | tuple[int, int]
"""Two halves, uint64."""


class _Told(NamedTuple):
    """How far lines of progress have told an answer."""

    num_tokens: int  # of the answer
    has_ended: bool
    parent: tuple[int, int]  # the key of its last whole piece, or its root


class _Growth(NamedTuple):
    """An answer that has to be told."""

    line: dict[str, object]  # without its keys
    chain: tuple[_Key, list[int]]  # what is to be hashed, see `Recorder._keys`
    arrival: Arrival
    told: list[_Told]  # of its request
    place: int  # in `told`
    num_tokens: int
    has_ended: bool


class Recorder:
    """Writes the run of an engine to a new file, compressed if it ends in .gz or .zst.

    `settings` are what the run had, by the names of the options of `pagedkv simulate`; numbers
    and booleans. `block_size` is in tokens. `secret` (16 bytes, random unless given) keys the
    hash of the pieces: the same secret writes the same bytes.

    Not thread-safe: one thread at a time. Raises `InvalidInput`, one line, for a file that
    exists already or cannot be made. If writing fails later the run goes on without it:
    `failure` says why, and `close` raises it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        block_size: int,
        settings: Mapping[str, int | float | bool],
        secret: bytes | None = None,
    ) -> None:
        secret = os.urandom(16) if secret is None else secret
        if len(secret) != 16:
            raise InvalidInput(f"secret is {len(secret)} bytes: give 16 bytes")
        self.path = Path(path)
        self.granularity = math.gcd(block_size, FINEST)
        self.failure: str | None = None
        self._secret = np.frombuffer(secret, dtype="<u8").astype(np.uint64)
        self._settings: Mapping[str, int | float | bool] | None = dict(settings)
        self._num_requests = 0
        self._num_under_way = 0
        self._told: dict[int, list[_Told]] = {}  # by request: of each of its samples
        self._progress_s = self._asked_s = -math.inf
        self._lines: list[bytes] = []
        self._took_us: list[int] = []  # of each step since the last line of progress
        self._work: list[tuple[int, int, int, int]] = []  # of each of these
        self._last_step_s: float | None = None  # when the last of these began
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._file: FileIO | None = None
        try:
            # Unbuffered: a piece is written with one call, so it is there whole or not at all.
            self._file = FileIO(self.path, "x")
        except FileExistsError:
            raise _exists(self.path) from None
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or error
            raise InvalidInput(f"recording {self.path}: cannot be written: {problem}") from error

    def arrived(
        self, *, s: float, step: int, namespace: Namespace | None, is_shared: bool = True
    ) -> Arrival:
        """A request came `s` seconds after the engine began, when it had begun `step` steps.

        Not `is_shared`: nothing of it is cached, or found in the cache.
        """
        root = root_key(self._secret, {} if namespace is None else namespace)
        arrival = Arrival(self._num_requests, s, step, root, is_shared)
        self._num_requests += 1
        self._num_under_way += 1
        return arrival

    def ended(self, arrival: Arrival, prompt_ids: Sequence[int], answers: Iterable[Answer]) -> None:
        """All samples of a request have ended. `flush` writes it.

        Requests that are cancelled before the same step are told in the order in which they were.
        """
        self._num_under_way -= 1
        self._told.pop(arrival.number, None)
        listed = list(answers)
        pieces = self._keys(
            [
                (arrival.root, [*prompt_ids, *answer.token_ids] if arrival.is_shared else [])
                for answer in listed
            ]
        )
        for answer, (keys, _) in zip(listed, pieces):
            line = _came(arrival, len(prompt_ids)) | _how_far(arrival, answer)
            line |= {"prefix_granularity": self.granularity, "covers_output": True}
            self._add(line | _shared(arrival, keys))

    def flush(self, *, s: float, step: int) -> None:
        """Write what ended since the last time, in one piece.

        It is `s` seconds after the engine began, and before step number `step`. If nobody is
        under way any more the piece says so: what is written then is the whole run so far.
        """
        if not self._lines:
            return
        if self._num_under_way == 0:
            self._add({"step": step, "s": s, "under_way": []} | self._taken_steps())
            self._progress_s = s
        self._write()

    def stepped(
        self,
        lengths: NDArray[np.int64],
        query_starts: NDArray[np.int64],
        *,
        start_s: float,
        end_s: float,
    ) -> None:
        """A step was computed, from `start_s` to `end_s` seconds after the engine began.

        `lengths` int64 [n] and `query_starts` int64 [n + 1] are those of its batch. It has taken
        until the next one begins, unless nobody is under way between the two.
        """
        num_new = query_starts[1:] - query_starts[:-1]
        self._work.append(step_work(lengths - num_new, num_new, len(num_new)))
        self._took_us.append(_us(end_s - start_s))
        self._last_step_s = start_s

    def is_progress_due(self, s: float) -> bool:
        """Whether lines of progress would be too far apart without one now.

        To be asked before each step, `s` seconds after the engine began; the next step is taken
        to last for as long as the last one.
        """
        if self._last_step_s is not None:
            self._took_us[-1] = _us(s - self._last_step_s)
            self._last_step_s = None
        step_s, self._asked_s = s - self._asked_s, s
        return self._num_under_way > 0 and s + step_s - self._progress_s >= LONGEST_GAP_S

    def was_told(self, arrival: Arrival) -> bool:
        """Whether a line of progress has named this request."""
        return arrival.number in self._told

    def progress(self, under_way: Iterable[UnderWay], *, s: float, step: int) -> None:
        """Write how far all who are under way have come, before step number `step`.

        Everything before that step is settled. Requests that were told and have no new token
        since, nor an answer that ended, may be left out.
        """
        grown = [growth for request in under_way for growth in self._grown(request)]
        lines = []
        for growth, (keys, last) in zip(grown, self._keys([growth.chain for growth in grown])):
            lines.append(growth.line | _shared(growth.arrival, keys))
            growth.told[growth.place] = _Told(growth.num_tokens, growth.has_ended, last)
        self._add(
            {"step": step, "s": s, "prefix_granularity": self.granularity, "under_way": lines}
            | self._taken_steps()
        )
        self._progress_s = s
        self._write()

    def _grown(self, request: UnderWay) -> Iterator[_Growth]:
        """The answers of a request that have grown, or ended, since they were last told."""
        arrival, prompt_ids = request.arrival, request.prompt_ids
        told = self._told.get(arrival.number)
        came: dict[str, object] = {}
        if told is None:
            told = [_Told(-1, False, _pair(arrival.root))] * len(request.answers)
            self._told[arrival.number] = told
            came = _came(arrival, len(prompt_ids))
        for place, answer in enumerate(request.answers):
            before, num_tokens = told[place], len(answer.token_ids)
            if before.num_tokens == num_tokens and before.has_ended == answer.has_ended:
                continue
            line = came | _how_far(arrival, answer) | ({"ended": True} if answer.has_ended else {})
            new_ids: list[int] = []
            if arrival.is_shared:
                start = self._num_whole(len(prompt_ids), before)
                in_answer = max(start - len(prompt_ids), 0)
                new_ids = [*prompt_ids[start:], *answer.token_ids[in_answer:]]
            chain = before.parent, new_ids
            yield _Growth(line, chain, arrival, told, place, num_tokens, answer.has_ended)

    def _num_whole(self, prompt_tokens: int, told: _Told) -> int:
        """Tokens, prompt included, in the whole pieces that were told."""
        num_tokens = prompt_tokens + told.num_tokens if told.num_tokens >= 0 else 0
        return num_tokens - num_tokens % self.granularity

    def _taken_steps(self) -> dict[str, object]:
        """The steps since the last line of progress, a list for each of their numbers."""
        took_us, self._took_us = self._took_us, []
        work, self._work = self._work, []
        self._last_step_s = None
        if not took_us:
            return {}
        return {"steps": {"took_us": took_us, **dict(zip(_WORK, zip(*work)))}}

    def _add(self, line: dict[str, object]) -> None:
        if self._settings is not None:
            line["engine"] = self._settings
            self._settings = None
        self._lines.append(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def _write(self) -> None:
        piece = b"".join(self._lines)
        self._lines.clear()
        if self._file is None:
            return
        start = self._file.tell()
        try:
            packed = memoryview(self._packed(piece))
            while packed:
                packed = packed[self._file.write(packed) :]
        except OSError as error:  # a full disk stops no run, and leaves no half a line
            self.failure = (
                f"recording {self.path}: cannot be written: {error.strerror or error}; it ends here"
            )
            with contextlib.suppress(OSError):
                self._file.truncate(start)
            self._shut()

    def close(self) -> None:
        """End. Requests that have not ended are in the recording as the last progress told them.

        Raises `InvalidInput` if writing failed before.
        """
        self._shut()
        if self.failure is not None:
            raise InvalidInput(self.failure)

    def _shut(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _packed(self, piece: bytes) -> bytes:
        # The quickest level: keys are random, and half of what their digits take is all there is.
        if self.path.suffix == ".gz":
            return gzip.compress(piece, compresslevel=1, mtime=0)
        if self.path.suffix == ".zst":
            return self._compressor.compress(piece)
        return piece

    def _keys(
        self, chains: Sequence[tuple[_Key, list[int]]]
    ) -> Iterator[tuple[list[str], tuple[int, int]]]:
        """For each chain, its pieces' keys in hexadecimal, and the last whole piece's as numbers.

        A chain is the key before its first piece, and its token ids. All are hashed in one call:
        there are as many as run at once.
        """
        size = self.granularity
        parents = np.array([parent for parent, _ in chains], dtype=np.uint64).reshape(-1, 2)
        counts = [len(ids) for _, ids in chains]
        starts = np.zeros(len(chains) + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])
        ids = np.array([i for _, chain in chains for i in chain], dtype=np.int64)
        num_keys = [blocks_for(count, size) for count in counts]
        keys = np.empty((sum(num_keys), 2), dtype=np.uint64)
        _write_chain_keys(self._secret, parents, ids, starts, size, keys)
        digits = keys.astype(">u8").tobytes().hex()
        first = 0
        for count, number, (parent, _) in zip(counts, num_keys, chains):
            stop = first + number
            whole = first + count // size
            last = keys[whole - 1] if whole > first else parent
            yield [digits[32 * i : 32 * i + 32] for i in range(first, stop)], _pair(last)
            first = stop


def _came(arrival: Arrival, prompt_tokens: int) -> dict[str, object]:
    return {
        "arrival_s": arrival.s,
        "arrival_step": arrival.step,
        "prompt_tokens": prompt_tokens,
    }


def _how_far(arrival: Arrival, answer: Answer) -> dict[str, object]:
    line: dict[str, object] = {
        "request": arrival.number,
        "sample": answer.sample,
        "output_tokens": len(answer.token_ids),
    }
    if answer.first_token_s is not None:
        line["first_token_s"] = round(answer.first_token_s, 6)
    if answer.cut is not None:
        line["failed_step" if answer.cut.by_failure else "cancelled_step"] = answer.cut.step
    return line


def _shared(arrival: Arrival, keys: list[str]) -> dict[str, object]:
    return {"prefix_ids": keys} if arrival.is_shared else {"unshared": True, "prefix_ids": []}


def _us(seconds: float) -> int:
    return max(round(1e6 * seconds), 1)


def _pair(key: _Key) -> tuple[int, int]:
    return int(key[0]), int(key[1])


@compiled_in_place
def _write_chain_keys(
    secret: NDArray[np.uint64],
    parents: NDArray[np.uint64],
    token_ids: NDArray[np.int64],
    starts: NDArray[np.int64],
    size: int,
    keys: NDArray[np.uint64],
) -> None:
    """Write the keys of all pieces of `size` tokens, of each chain the last one maybe of fewer.

    Chain `i` is `token_ids[starts[i]:starts[i + 1]]` after `parents[i]`, uint64 [n, 2].
    """
    place = 0
    for i in range(len(parents)):
        k0, k1 = parents[i, 0], parents[i, 1]
        for start in range(starts[i], starts[i + 1], size):
            stop = min(start + size, starts[i + 1])
            k0, k1 = block_key(secret, k0, k1, token_ids, start, stop)
            keys[place, 0] = k0
            keys[place, 1] = k1
            place += 1


def check_is_new(path: str | os.PathLike[str]) -> None:
    """Raise `InvalidInput` for a file that exists, or whose folder does not: better before a model
    is loaded than after."""
    if Path(path).exists():
        raise _exists(Path(path))
    if not Path(path).parent.is_dir():
        raise InvalidInput(f"recording {path}: there is no folder {Path(path).parent}")


def _exists(path: Path) -> InvalidInput:
    return InvalidInput(f"recording {path}: the file exists; name another or remove it")
