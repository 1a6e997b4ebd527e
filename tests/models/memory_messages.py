"""Reads what the memory page is told, as the page does."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

_TYPES = {"Uint32Array": "<u4", "Int32Array": "<i4", "Float32Array": "<f4"}


def read_messages(pieces: Iterable[bytes]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The facts and the arrays of each message in a stream that comes in pieces."""
    held = b""
    for piece in pieces:
        held += piece
        while len(held) >= 4 and len(held) >= 4 + (size := struct.unpack_from("<I", held)[0]):
            yield _decoded(held[4 : 4 + size])
            held = held[4 + size :]


def _decoded(body: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    (head,) = struct.unpack_from("<I", body)
    facts = json.loads(body[4 : 4 + head])
    place = 4 + head
    arrays = {}
    for name, kind, shape in facts.pop("arrays"):
        count = int(np.prod(shape))
        assert place % 4 == 0
        arrays[name] = np.frombuffer(body, _TYPES[kind], count, place).reshape(shape)
        place += 4 * count
    assert place == len(body)
    return facts, arrays
