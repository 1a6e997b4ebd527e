"""Page-based memory for the key-value cache of language models."""

from pagedkv._version import __version__
from pagedkv.errors import BrokenLaw, InvalidInput, OutOfBlocks, PagedKVError, UnknownSequence
from pagedkv.memory import Address, KVCacheManager, Statistics, Step

__all__ = [
    "Address",
    "BrokenLaw",
    "InvalidInput",
    "KVCacheManager",
    "OutOfBlocks",
    "PagedKVError",
    "Statistics",
    "Step",
    "UnknownSequence",
    "__version__",
]
