"""A message to the page: a few facts as JSON, and arrays as they lie in memory.

::

    | length of all that follows, u32 | length of the facts, u32 | facts, JSON, padded | arrays |

Little-endian. The facts have `arrays`: of each its name, its type as JavaScript calls it, and its
shape; they follow in that order, each padded to a multiple of four bytes, so that a browser looks
at them where they are.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_TYPES = {
    np.dtype(np.uint32): (np.dtype("<u4"), "Uint32Array"),
    np.dtype(np.int32): (np.dtype("<i4"), "Int32Array"),
    np.dtype(np.float32): (np.dtype("<f4"), "Float32Array"),
}
"""How each is sent, and what JavaScript calls it."""

_JSON = json.JSONEncoder(separators=(",", ":"))


def message(facts: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """The bytes of a message. Arrays are uint32, int32 or float32."""
    described = []
    pieces = []
    for name, array in arrays.items():
        sent, kind = _TYPES[array.dtype]
        described.append((name, kind, array.shape))
        pieces.append(array.astype(sent, copy=False).tobytes())
    head = _JSON.encode({**facts, "arrays": described}).encode()
    head += b" " * (-len(head) % 4)
    size = 4 + len(head) + sum(map(len, pieces))
    return b"".join([struct.pack("<II", size, len(head)), head, *pieces])
