"""Keys and values in a GPU's memory, and attention that reads them there, in Triton.

`GPUStorage` has the verbs of `pagedkv.attention.KVStorage`, with the same meaning, for tensors on a
CUDA device. It needs torch and triton, which `pagedkv.attention` does not.
"""

from pagedkv.attention.gpu.plan import DecodePlan, Plan
from pagedkv.attention.gpu.storage import GPUStorage

__all__ = ["DecodePlan", "GPUStorage", "Plan"]
