"""What is in the blocks: keys and values in pages, and attention that reads them there."""

from pagedkv.attention.pages import LayerShape
from pagedkv.attention.reference import reference_attend
from pagedkv.attention.storage import KVStorage

__all__ = ["KVStorage", "LayerShape", "reference_attend"]
