"""SipHash-2-4 with 128 bits of output over bytes, in Python's own integers.

After Aumasson and Bernstein, "SipHash: a fast short-input PRF" (2012); the longer output is that of
their reference implementation.
"""

from __future__ import annotations

_MASK = 2**64 - 1


def _rotated(word: int, by: int) -> int:
    return (word << by | word >> (64 - by)) & _MASK


def _rounds(v: list[int], number: int) -> None:
    for _ in range(number):
        v[0] = (v[0] + v[1]) & _MASK
        v[2] = (v[2] + v[3]) & _MASK
        v[1] = _rotated(v[1], 13) ^ v[0]
        v[3] = _rotated(v[3], 16) ^ v[2]
        v[0] = _rotated(v[0], 32)
        v[2] = (v[2] + v[1]) & _MASK
        v[0] = (v[0] + v[3]) & _MASK
        v[1] = _rotated(v[1], 17) ^ v[2]
        v[3] = _rotated(v[3], 21) ^ v[0]
        v[2] = _rotated(v[2], 32)


def siphash_2_4_128(secret: bytes, message: bytes) -> bytes:
    """16 bytes for a message of any length under a secret of 16 bytes."""
    k0, k1 = int.from_bytes(secret[:8], "little"), int.from_bytes(secret[8:], "little")
    constants = [
        int.from_bytes(b"somepseudorandomlygeneratedbytes"[i : i + 8]) for i in (0, 8, 16, 24)
    ]
    v = [key ^ constant for key, constant in zip([k0, k1, k0, k1], constants)]
    v[1] ^= 0xEE
    padded = message + bytes(-(len(message) + 1) % 8) + bytes([len(message) % 256])
    for i in range(0, len(padded), 8):
        word = int.from_bytes(padded[i : i + 8], "little")
        v[3] ^= word
        _rounds(v, 2)
        v[0] ^= word
    v[2] ^= 0xEE
    _rounds(v, 4)
    first = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    _rounds(v, 4)
    second = v[0] ^ v[1] ^ v[2] ^ v[3]
    return first.to_bytes(8, "little") + second.to_bytes(8, "little")
