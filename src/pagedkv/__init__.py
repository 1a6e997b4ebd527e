"""Page-based memory for the key-value cache of language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagedkv._version import __version__
from pagedkv.errors import (
    BrokenLaw,
    InvalidInput,
    NeverFits,
    OutOfBlocks,
    PagedKVError,
    UnknownSequence,
)

if TYPE_CHECKING:
    from pagedkv.memory import Address, KVCacheManager, Statistics, Step

__all__ = [
    "Address",
    "BrokenLaw",
    "InvalidInput",
    "KVCacheManager",
    "NeverFits",
    "OutOfBlocks",
    "PagedKVError",
    "Statistics",
    "Step",
    "UnknownSequence",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Load the memory when it is first asked for: Numba takes most of a second, help none of it."""
    if name in ("Address", "KVCacheManager", "Statistics", "Step"):
        from pagedkv import memory

        return getattr(memory, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What there is to use, and what is loaded only when it is asked for."""
    return __all__
