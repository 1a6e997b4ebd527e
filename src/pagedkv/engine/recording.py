"""A run, written down so that the simulator can repeat it: `docs/recording.md`.

One line a sample, in the plain format of the simulator's traces: when its request came, how long
it was, and what it has in common with others, as keys of its pieces. Never token ids or text:
the keys are those of `memory.block_key` under a secret of the recording's own, which is thrown
away with it. They tell who shares a prefix with whom, and nothing about what it says.

A request is written when it ends, in one piece, so that whatever ends the process leaves whole
requests behind. Compressed files get a frame of their own for each piece, for the same reason.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray

from pagedkv.errors import InvalidInput
from pagedkv.memory.block_key import Namespace, block_key, root_key, write_block_keys
from pagedkv.memory.block_table import blocks_for

FINEST = 8
"""Tokens that a key stands for, at most: a replay is exact at block sizes that are a multiple."""


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
        self._lines: list[bytes] = []
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
        return arrival

    def ended(self, arrival: Arrival, prompt_ids: Sequence[int], answers: Iterable[Answer]) -> None:
        """All samples of a request have ended. `flush` writes it.

        Requests that are cancelled before the same step are told in the order in which they were.
        """
        for answer in answers:
            line: dict[str, object] = {
                "arrival_s": arrival.s,
                "arrival_step": arrival.step,
                "request": arrival.number,
                "sample": answer.sample,
                "prompt_tokens": len(prompt_ids),
                "output_tokens": len(answer.token_ids),
            }
            if answer.cut is not None:
                line["failed_step" if answer.cut.by_failure else "cancelled_step"] = answer.cut.step
            if self._settings is not None:
                line["engine"] = self._settings
                self._settings = None
            line |= {"prefix_granularity": self.granularity, "covers_output": True}
            if arrival.is_shared:
                line["prefix_ids"] = self._keys(arrival.root, [*prompt_ids, *answer.token_ids])
            else:
                line |= {"unshared": True, "prefix_ids": []}
            self._lines.append(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def flush(self) -> None:
        """Write what ended since the last time, in one piece."""
        if not self._lines:
            return
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
        """Write what is left, and end. Requests that have not ended are not in the recording.

        Raises `InvalidInput` if writing failed, now or before.
        """
        self.flush()
        self._shut()
        if self.failure is not None:
            raise InvalidInput(self.failure)

    def _shut(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _packed(self, piece: bytes) -> bytes:
        if self.path.suffix == ".gz":
            return gzip.compress(piece, mtime=0)
        if self.path.suffix == ".zst":
            return zstandard.ZstdCompressor().compress(piece)
        return piece

    def _keys(self, root: NDArray[np.uint64], token_ids: list[int]) -> list[str]:
        """A key for each piece of `granularity` tokens after what is before it, in hexadecimal."""
        ids = np.array(token_ids, dtype=np.int64)
        size = self.granularity
        num_full = len(ids) // size
        keys = np.empty((blocks_for(len(ids), size), 2), dtype=np.uint64)
        write_block_keys(self._secret, root, ids, size, keys)
        if num_full < len(keys):
            parent = keys[num_full - 1] if num_full else root
            start = num_full * size
            keys[num_full] = block_key(self._secret, parent[0], parent[1], ids, start, len(ids))
        digits = keys.astype(">u8").tobytes().hex()
        return [digits[i : i + 32] for i in range(0, len(digits), 32)]


def check_is_new(path: str | os.PathLike[str]) -> None:
    """Raise `InvalidInput` for a file that exists: better before a model is loaded than after."""
    if Path(path).exists():
        raise _exists(Path(path))


def _exists(path: Path) -> InvalidInput:
    return InvalidInput(f"recording {path}: the file exists; name another or remove it")
