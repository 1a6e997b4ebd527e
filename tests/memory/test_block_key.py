from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import siphash
from pagedkv import KVCacheManager
from pagedkv.errors import InvalidInput
from pagedkv.memory import block_key

SECRET = bytes(range(16))

# `vectors_sip128` of the authors' reference implementation (github.com/veorq/SipHash, vectors.h):
# of the secret 00..0f and the message 00, 01, 02, .. of so many bytes.
REFERENCE = {
    0: "a3817f04ba25a8e66df67214c7550293",
    8: "3b62a9ba6258f5610f83e264f31497b4",
    16: "6ee2a4ca67b054bbfd3315bf85230577",
    24: "2db479ae78bd50d8882a8a178a6132ad",
    32: "7c3956ca5eeafc3e363e9d556546eb68",
    40: "df6a301e95c95dad97ae0cc8c6913bd8",
    48: "f7e5aef549f782cf379055a608269b16",
    56: "1938f2cf72d54ee97e94166fa91d2a36",
}

Key = tuple[int, int]
words = st.integers(0, 2**64 - 1)
token_ids = st.integers(0, block_key.MAX_TOKEN_ID)


def as_words(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype="<u8").astype(np.uint64)


def as_bytes(key: tuple[np.uint64, np.uint64]) -> bytes:
    return b"".join(int(half).to_bytes(8, "little") for half in key)


def key_of(
    tokens: list[int], parent: Key = (0, 0), secret: bytes = SECRET, start: int = 0
) -> bytes:
    ids = np.array(tokens, dtype=np.int64)
    first, second = np.array(parent, dtype=np.uint64)
    return as_bytes(block_key.block_key(as_words(secret), first, second, ids, start, len(ids)))


def root_of(namespace: block_key.Namespace, secret: bytes = SECRET) -> bytes:
    first, second = block_key.root_key(as_words(secret), namespace)
    return as_bytes((first, second))


@pytest.mark.parametrize("num_bytes", REFERENCE)
def test_hashes_equal_the_authors_vectors(num_bytes: int) -> None:
    message = bytes(range(num_bytes))
    expected = bytes.fromhex(REFERENCE[num_bytes])
    assert siphash.siphash_2_4_128(SECRET, message) == expected
    hashed = block_key.siphash_2_4_128(as_words(SECRET), as_words(message))
    assert as_bytes(hashed) == expected


@given(secret=st.binary(min_size=16, max_size=16), message=st.lists(words, max_size=40))
def test_hashes_equal_those_of_plain_integers(secret: bytes, message: list[int]) -> None:
    data = b"".join(word.to_bytes(8, "little") for word in message)
    hashed = block_key.siphash_2_4_128(as_words(secret), as_words(data))
    assert as_bytes(hashed) == siphash.siphash_2_4_128(secret, data)


@given(tokens=st.lists(token_ids, min_size=1, max_size=37), parent=st.tuples(words, words))
def test_a_key_hashes_tagged_and_counted_tokens_and_parent(tokens: list[int], parent: Key) -> None:
    data = b"".join(token.to_bytes(4, "little") for token in tokens)
    tokens_header = (block_key.TAG_TOKENS << 56 | len(data)).to_bytes(8, "little")
    parent_header = (block_key.TAG_PARENT << 56 | 16).to_bytes(8, "little")
    message = tokens_header + data + bytes(-len(data) % 8) + parent_header
    message += b"".join(half.to_bytes(8, "little") for half in parent)
    assert key_of(tokens, parent) == siphash.siphash_2_4_128(SECRET, message)


@given(
    tokens=st.lists(token_ids, min_size=1, max_size=9),
    parent=st.tuples(words, words),
    data=st.data(),
)
def test_every_token_the_parent_and_the_secret_change_a_key(
    tokens: list[int], parent: Key, data: st.DataObject
) -> None:
    key = key_of(tokens, parent)
    place = data.draw(st.integers(0, len(tokens) - 1))
    other = list(tokens)
    other[place] ^= 1 << data.draw(st.integers(0, 31))
    assert key_of(other, parent) != key
    assert key_of(tokens, (parent[0] ^ 1, parent[1])) != key
    assert key_of(tokens, (parent[0], parent[1] ^ 1)) != key
    assert key_of([*tokens, 0], parent) != key  # a word that is padded is no token of its own
    assert key_of(tokens, parent, secret=bytes(16)) != key
    assert key_of(tokens, parent, secret=bytes(8) + SECRET[8:]) != key
    assert key_of(tokens, parent, secret=SECRET[:8] + bytes(8)) != key


def test_a_key_does_not_depend_on_where_in_an_array_its_tokens_stand() -> None:
    assert key_of([9, 9, 9, 1, 2, 3], start=3) == key_of([1, 2, 3])


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 16, 17])
def test_keys_of_all_full_blocks_are_a_chain_from_the_root(block_size: int) -> None:
    ids = np.arange(3 * block_size + block_size // 2, dtype=np.int64)
    root = np.array([3, 4], dtype=np.uint64)
    keys = np.zeros((3, 2), dtype=np.uint64)
    block_key.write_block_keys(as_words(SECRET), root, ids, block_size, keys)
    parent: Key = (3, 4)
    for i in range(3):
        expected = key_of(list(range(i * block_size, (i + 1) * block_size)), parent)
        assert as_bytes((keys[i, 0], keys[i, 1])) == expected
        parent = int(keys[i, 0]), int(keys[i, 1])


parts = st.one_of(st.text(max_size=9), st.binary(max_size=9), st.integers())
namespaces = st.dictionaries(st.text(max_size=9), parts, max_size=3)


def typed(namespace: block_key.Namespace) -> dict[str, tuple[type, str | bytes | int]]:
    return {name: (type(value), value) for name, value in namespace.items()}


@given(one=namespaces, other=namespaces)
def test_two_namespaces_have_one_root_exactly_if_all_entries_are_the_same(
    one: block_key.Namespace, other: block_key.Namespace
) -> None:
    assert (root_of(one) == root_of(other)) == (typed(one) == typed(other))
    assert root_of(dict(reversed(list(one.items())))) == root_of(one)


def test_a_root_is_no_block_key_of_the_same_words() -> None:
    """The tags keep apart what has the same lengths and the same content."""
    assert block_key.TAG_NAMESPACE != block_key.TAG_TOKENS != block_key.TAG_PARENT
    message = (block_key.TAG_NAMESPACE << 56 | 1).to_bytes(8, "little") + b"a" + bytes(7)
    message += (block_key.TAG_NAMESPACE << 56 | 3).to_bytes(8, "little") + b"str" + bytes(5)
    message += (block_key.TAG_NAMESPACE << 56 | 2).to_bytes(8, "little") + b"bc" + bytes(6)
    assert root_of({"a": "bc"}) == siphash.siphash_2_4_128(SECRET, message)


def test_what_json_can_hold_can_be_a_namespace() -> None:
    assert root_of({"salt": "\ud800"}) != root_of({"salt": "\udfff"})
    assert root_of({"salt": 10**30}) != root_of({"salt": -(10**30)})


@pytest.mark.parametrize(
    "namespace", [{"a": 1.5}, {"a": True}, {"a": None}, {"a": ["b"]}, {1: "a"}, "salt", ["salt"]]
)
def test_a_namespace_that_is_none_is_refused_by_name(namespace: block_key.Namespace) -> None:
    with pytest.raises(InvalidInput, match="namespace"):
        KVCacheManager(2, 2).add_sequence([1, 2], namespace=namespace)


def test_keys_differ_between_processes_unless_the_secret_is_given() -> None:
    assert (KVCacheManager(1)._secret != KVCacheManager(1)._secret).any()
    assert (KVCacheManager(1, secret=SECRET)._secret == as_words(SECRET)).all()
