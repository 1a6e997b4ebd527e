"""The pool of physical blocks: what is known of each, and which one is handed out next.

A block is an int; facts about blocks are columns. The free list is doubly linked through two
columns, so that a cached block can leave it from the middle in constant time, and it *is* the
eviction order::

    head ─ blocks without a key, last released first ─ cached blocks, first released first ─ tail
    └─ handed out from here                                          released ones go here ─┘

Nothing that could still hit is lost while a useless block is free.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedkv.compiling import compiled_inline
from pagedkv.errors import BrokenLaw
from pagedkv.memory import prefix_cache
from pagedkv.memory.blocks import (
    CACHED,
    EVICTED,
    FREE,
    NO_KEY,
    PENDING,
    PUBLICATIONS,
    PUBLISHED,
    REVIVED,
    TAKEN,
    BlockPool,
)

_BELOW_ZERO: Any = ("law 2: a block without users was released",)


@compiled_inline
def _unlink(pool: BlockPool, block: int) -> None:
    before, after = pool.previous_free[block], pool.next_free[block]
    pool.next_free[before] = after
    pool.previous_free[after] = before


@compiled_inline
def _link_between(pool: BlockPool, block: int, before: int, after: int) -> None:
    pool.next_free[block] = after
    pool.previous_free[block] = before
    pool.next_free[before] = block
    pool.previous_free[after] = block


@compiled_inline
def take(pool: BlockPool) -> int:
    """Hand out the block at the head of the free list, with count 1 and no key.

    The caller has made sure that one is free.
    """
    ends = len(pool.ref_count)
    block = int(pool.next_free[ends])
    _unlink(pool, block)
    pool.counters[FREE] -= 1
    pool.counters[TAKEN] += 1
    if pool.key_state[block] == PUBLISHED:
        prefix_cache.remove(pool, block)
        pool.counters[CACHED] -= 1
        pool.counters[EVICTED] += 1
    pool.key_state[block] = NO_KEY
    pool.ref_count[block] = 1
    return block


@compiled_inline
def share(pool: BlockPool, block: int) -> None:
    """Add a user to `block`; a cached one leaves the free list, wherever in it it is."""
    if pool.ref_count[block] == 0:
        _unlink(pool, block)
        pool.counters[FREE] -= 1
        pool.counters[CACHED] -= 1
        pool.counters[REVIVED] += 1
    pool.ref_count[block] += 1


@compiled_inline
def release(pool: BlockPool, block: int) -> None:
    """Remove a user of `block`; after the last one it is free, or cached if its key is published.

    A key that was never published goes: its content may never have been written.

    Raises `BrokenLaw` for a block without users, and changes nothing. Compiled code raises with
    constants only, so it is `verify` that says which block.
    """
    if pool.ref_count[block] <= 0:
        raise BrokenLaw(_BELOW_ZERO)
    pool.ref_count[block] -= 1
    if pool.ref_count[block] == 0:
        ends = len(pool.ref_count)
        pool.counters[FREE] += 1
        if pool.key_state[block] == PUBLISHED:
            pool.counters[CACHED] += 1
            _link_between(pool, block, int(pool.previous_free[ends]), ends)
        else:
            pool.key_state[block] = NO_KEY
            _link_between(pool, block, ends, int(pool.next_free[ends]))


@compiled_inline
def await_key(pool: BlockPool, block: int, key0: np.uint64, key1: np.uint64) -> None:
    """Note the key that `block` will be published under once its content is there."""
    pool.key[block, 0] = key0
    pool.key[block, 1] = key1
    pool.key_state[block] = PENDING


@compiled_inline
def publish(pool: BlockPool, block: int) -> None:
    """Make a used block with a pending key findable.

    Where another block has the key already, the two hold the same content. If that one is free,
    this one takes its place in the index, being the more recently used, and the other becomes a
    free block like any; if it is in use, this one stays without a key.
    """
    if pool.key_state[block] != PENDING:
        return
    other = prefix_cache.insert(pool, block)
    if other >= 0:
        if pool.ref_count[other] > 0:
            pool.key_state[block] = NO_KEY
            return
        forget(pool, other)
        prefix_cache.insert(pool, block)
    pool.key_state[block] = PUBLISHED
    pool.counters[PUBLICATIONS] += 1


@compiled_inline
def forget(pool: BlockPool, block: int) -> None:
    """Drop the published key of a free block, which becomes the next to be handed out."""
    ends = len(pool.ref_count)
    prefix_cache.remove(pool, block)
    pool.key_state[block] = NO_KEY
    pool.counters[CACHED] -= 1
    _unlink(pool, block)
    _link_between(pool, block, ends, int(pool.next_free[ends]))


@compiled_inline
def expect_publication(pool: BlockPool, block: int) -> None:
    """`block` will soon be published: have its place in the index at hand."""
    prefix_cache.expect(pool, pool.key[block, 0])


@compiled_inline
def nth_free(pool: BlockPool, n: int) -> int:
    """The block that is handed out after `n` others, or -1."""
    ends = len(pool.ref_count)
    block = int(pool.next_free[ends])
    while n > 0 and block != ends:
        block = int(pool.next_free[block])
        n -= 1
    return block if block != ends else -1


@compiled_inline
def expect_eviction(pool: BlockPool, block: int) -> int:
    """`block` will soon be handed out: have its place in the index at hand; returns the next."""
    if pool.key_state[block] == PUBLISHED:
        prefix_cache.expect(pool, pool.key[block, 0])
    after = int(pool.next_free[block])
    return after if after != len(pool.ref_count) else -1
