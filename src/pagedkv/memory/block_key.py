"""Keys of full blocks: what makes two blocks hold the same keys and values.

The key and value of a token depend on all tokens before it, so a block's key covers its own
token ids and, through its parent's key, everything before them. The first block's parent is
the key of the sequence's namespace: whatever else changes K and V (a tenant's salt, an adapter).

A key is SipHash-2-4 with 128 bits of output (Aumasson and Bernstein, "SipHash: a fast
short-input PRF", 2012) under a secret. Without the secret nobody can build two prompts whose
keys collide, or probe for what others have cached by offline search; with 128 bits an accidental
collision among 2**40 blocks has a chance below 2**-48. Every part of a message is preceded by
a word of its tag and its length in bytes, so that no two different lists of parts give the same
message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pagedkv.compiling import compiled_in_place
from pagedkv.errors import InvalidInput

Namespace: TypeAlias = Mapping[str, str | bytes | int]
"""What besides the tokens changes K and V, by name: `{"salt": "tenant-7", "adapter": "fr"}`."""

TAG_NAMESPACE = 1
TAG_PARENT = 2
TAG_TOKENS = 3

MAX_TOKEN_ID = 2**32 - 1

_U = np.uint64
_INIT0, _INIT1, _INIT2, _INIT3 = (
    _U(0x736F6D6570736575),
    _U(0x646F72616E646F6D),
    _U(0x6C7967656E657261),
    _U(0x7465646279746573),
)
_EE, _DD = _U(0xEE), _U(0xDD)
_R13, _R16, _R17, _R21, _R32 = _U(13), _U(16), _U(17), _U(21), _U(32)
_L13, _L16, _L17, _L21 = _U(51), _U(48), _U(47), _U(43)
_TAG_SHIFT, _LENGTH_SHIFT, _LENGTH_MASK = _U(56), _U(56), _U(0xFF)
_PARENT_HEADER = _U(TAG_PARENT << 56 | 16)

State: TypeAlias = tuple[np.uint64, np.uint64, np.uint64, np.uint64]


@compiled_in_place
def _round(v0: np.uint64, v1: np.uint64, v2: np.uint64, v3: np.uint64) -> State:
    v0 = v0 + v1
    v1 = ((v1 << _R13) | (v1 >> _L13)) ^ v0
    v0 = (v0 << _R32) | (v0 >> _R32)
    v2 = v2 + v3
    v3 = ((v3 << _R16) | (v3 >> _L16)) ^ v2
    v0 = v0 + v3
    v3 = ((v3 << _R21) | (v3 >> _L21)) ^ v0
    v2 = v2 + v1
    v1 = ((v1 << _R17) | (v1 >> _L17)) ^ v2
    v2 = (v2 << _R32) | (v2 >> _R32)
    return v0, v1, v2, v3


@compiled_in_place
def _absorb(v0: np.uint64, v1: np.uint64, v2: np.uint64, v3: np.uint64, word: np.uint64) -> State:
    v3 = v3 ^ word
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ word, v1, v2, v3


@compiled_in_place
def _start(secret: NDArray[np.uint64]) -> State:
    s0, s1 = secret[0], secret[1]
    return s0 ^ _INIT0, s1 ^ _INIT1 ^ _EE, s0 ^ _INIT2, s1 ^ _INIT3


@compiled_in_place
def _finish(
    v0: np.uint64, v1: np.uint64, v2: np.uint64, v3: np.uint64, num_bytes: int
) -> tuple[np.uint64, np.uint64]:
    last = (np.uint64(num_bytes) & _LENGTH_MASK) << _LENGTH_SHIFT
    v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, last)
    v2 = v2 ^ _EE
    for _ in range(4):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    low = v0 ^ v1 ^ v2 ^ v3
    v1 = v1 ^ _DD
    for _ in range(4):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return low, v0 ^ v1 ^ v2 ^ v3


@compiled_in_place
def siphash_2_4_128(
    secret: NDArray[np.uint64], words: NDArray[np.uint64]
) -> tuple[np.uint64, np.uint64]:
    """SipHash-2-4-128 of a message of whole 64-bit little-endian words.

    `secret` uint64 [2], `words` uint64 [n]; returns the two halves, low first.
    """
    v0, v1, v2, v3 = _start(secret)
    for word in words:
        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, word)
    return _finish(v0, v1, v2, v3, 8 * len(words))


@compiled_in_place
def block_key(
    secret: NDArray[np.uint64],
    parent0: np.uint64,
    parent1: np.uint64,
    token_ids: NDArray[np.int64],
    start: int,
    stop: int,
) -> tuple[np.uint64, np.uint64]:
    """Key of the block that holds `token_ids[start:stop]` (int64 [n]) after `parent`.

    Two token ids share a word of the message; each is at most `MAX_TOKEN_ID`.
    """
    num_tokens = stop - start
    v0, v1, v2, v3 = _start(secret)
    header = (np.uint64(TAG_TOKENS) << _TAG_SHIFT) | np.uint64(4 * num_tokens)
    v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, header)
    for i in range(start, stop - 1, 2):
        word = np.uint64(token_ids[i]) | (np.uint64(token_ids[i + 1]) << _R32)
        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, word)
    if num_tokens % 2 == 1:
        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, np.uint64(token_ids[stop - 1]))
    # The parent comes last: a chain waits for one key after the other, and this way a
    # processor may begin the next block's token words before this block's key is known.
    v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, _PARENT_HEADER)
    v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, parent0)
    v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, parent1)
    num_words = 4 + (num_tokens + 1) // 2
    return _finish(v0, v1, v2, v3, 8 * num_words)


@compiled_in_place
def write_block_keys(
    secret: NDArray[np.uint64],
    root: NDArray[np.uint64],
    token_ids: NDArray[np.int64],
    block_size: int,
    keys: NDArray[np.uint64],
) -> None:
    """Write the keys of all full blocks of `token_ids` into `keys` uint64 [num_full_blocks, 2]."""
    k0, k1 = root[0], root[1]
    for i in range(len(token_ids) // block_size):
        k0, k1 = block_key(secret, k0, k1, token_ids, i * block_size, (i + 1) * block_size)
        keys[i, 0] = k0
        keys[i, 1] = k1


def root_key(secret: NDArray[np.uint64], namespace: Namespace) -> NDArray[np.uint64]:
    """The key that stands before the first block of every sequence of `namespace`, uint64 [2].

    Each entry goes in as its name, its type and its value, every part with its length, in order
    of the names: an adapter called like another tenant's salt gives another root.

    Raises `InvalidInput` for a name that is not str, or a value that is not str, bytes or int.
    """
    _check_namespace(namespace)
    message = bytearray()
    for name in sorted(namespace):
        kind, data = _typed(name, namespace[name])
        for part in (_encoded(name), kind, data):
            padded = part + bytes(-len(part) % 8)
            message += (TAG_NAMESPACE << 56 | len(part)).to_bytes(8, "little") + padded
    words = np.frombuffer(bytes(message), dtype="<u8").astype(np.uint64)
    return np.array(siphash_2_4_128(secret, words), dtype=np.uint64)


def _check_namespace(namespace: object) -> None:
    if not isinstance(namespace, Mapping) or not all(isinstance(name, str) for name in namespace):
        raise InvalidInput('a namespace maps names to values: give one like {"salt": "tenant-7"}')


def _typed(name: str, value: object) -> tuple[bytes, bytes]:
    """The type of a namespace entry's value, and its bytes."""
    if isinstance(value, str):
        return b"str", _encoded(value)
    if isinstance(value, bytes):
        return b"bytes", value
    if isinstance(value, int) and not isinstance(value, bool):
        return b"int", int(value).to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    raise InvalidInput(
        f"namespace entry {name!r} is {type(value).__name__}: give str, bytes or int"
    )


def _encoded(text: str) -> bytes:
    """UTF-8; half of a surrogate pair, which JSON may bring, is no reason to fail."""
    return text.encode("utf-8", "surrogatepass")
