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

_TYPES = {"<u4": "Uint32Array", "<i4": "Int32Array", "<f4": "Float32Array"}


def message(facts: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """The bytes of a message. Arrays are uint32, int32 or float32."""
    described = []
    pieces = []
    for name, array in arrays.items():
        plain = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        described.append((name, _TYPES[plain.dtype.str], plain.shape))
        pieces.append(plain.tobytes())
    head = json.dumps({**facts, "arrays": described}, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 4)
    size = 4 + len(head) + sum(map(len, pieces))
    return b"".join([struct.pack("<II", size, len(head)), head, *pieces])
