"""What a model computes around its matrix products, in a few Triton kernels instead of many small.

The code of a model is not changed, nor written again: single modules get another `forward`, where
one was shown, on random numbers, to give what their own gives. What is of another form stays as it
is. It needs triton.
"""

from pagedkv.engine.fused.layers import FusedLayers, fuse_layers

__all__ = ["FusedLayers", "fuse_layers"]
