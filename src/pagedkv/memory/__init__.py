"""Which physical block belongs to whom: blocks, tables, addresses, cached prefixes, copies."""

from pagedkv.memory.address import Address
from pagedkv.memory.block_key import Namespace
from pagedkv.memory.manager import KVCacheManager, Statistics, Step

__all__ = ["Address", "KVCacheManager", "Namespace", "Statistics", "Step"]
