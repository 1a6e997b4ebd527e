"""Random numbers by counting: the number of a place does not depend on how one got there.

A generator with a state would give a sequence other numbers when another sequence joins its
batch, or when it is preempted and computed again. Here the number of a token is a function of
the request's seed, the sample's stream and the token's position, nothing else: Philox4x32-10
(Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled

_U = np.uint64
_WORD = _U(0xFFFFFFFF)
_HALF = _U(32)
_MULTIPLIER_0, _MULTIPLIER_1 = _U(0xD2511F53), _U(0xCD9E8D57)
_WEYL_0, _WEYL_1 = _U(0x9E3779B9), _U(0xBB67AE85)
_HIGH_53 = _U(11)
_REQUEST_SEEDS = 2**64 - 1  # a stream that no sample has


@compiled
def random_words(
    seeds: NDArray[np.uint64], streams: NDArray[np.uint64], positions: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """64 random bits for each (seed, stream, position), all [n]: Philox's first two words.

    The seed is the key; the counter is the position, low word first, then the stream.
    """
    found = np.empty(len(seeds), dtype=np.uint64)
    for i in range(len(seeds)):
        k0, k1 = seeds[i] & _WORD, seeds[i] >> _HALF
        c0, c1 = positions[i] & _WORD, positions[i] >> _HALF
        c2, c3 = streams[i] & _WORD, streams[i] >> _HALF
        for _ in range(10):
            p0 = _MULTIPLIER_0 * c0
            p1 = _MULTIPLIER_1 * c2
            c0 = (p1 >> _HALF) ^ c1 ^ k0
            c1 = p1 & _WORD
            c2 = (p0 >> _HALF) ^ c3 ^ k1
            c3 = p0 & _WORD
            k0 = (k0 + _WEYL_0) & _WORD
            k1 = (k1 + _WEYL_1) & _WORD
        found[i] = c0 | (c1 << _HALF)
    return found


def uniforms(
    seeds: NDArray[np.uint64], streams: NDArray[np.uint64], positions: NDArray[np.uint64]
) -> NDArray[np.float64]:
    """A number in [0, 1) for each (seed, stream, position), all [n]: multiples of 2**-53."""
    words: NDArray[np.uint64] = random_words(seeds, streams, positions)
    return (words >> _HIGH_53).astype(np.float64) * 2.0**-53


def request_seed(engine_seed: int, request: int) -> int:
    """A seed for a request that brings none: by the engine's seed and the request's number."""
    words = random_words(
        np.array([engine_seed], dtype=np.uint64),
        np.array([_REQUEST_SEEDS], dtype=np.uint64),
        np.array([request], dtype=np.uint64),
    )
    return int(words[0])
