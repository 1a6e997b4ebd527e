"""Linear layers whose weights are laid out once for the CPU's matrix units.

Generating multiplies large weights by few rows at a time, and a weight as a checkpoint has it is
rearranged in every such product. oneDNN can keep it as it wants it.
"""

from __future__ import annotations

import torch
from torch import nn

ROWS = 16
"""The rows that the layout is chosen for; one chosen for 1 or 64 is slower at 4 to 64."""


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine's torch has oneDNN's packed products for `dtype`."""
    mkldnn = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not (
        hasattr(mkldnn, "_reorder_linear_weight") and hasattr(mkldnn, "_linear_pointwise")
    ):
        return False
    if dtype == torch.bfloat16:
        return bool(mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(mkldnn._is_mkldnn_fp16_supported())
    return bool(dtype == torch.float32)


class PackedLinear(nn.Module):
    """`nn.Linear` with its weight packed; the unpacked one is gone unless somebody else has it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias, requires_grad=False)
        # Models ask a layer's weight for its dtype and device. It holds nothing.
        self.weight = linear.weight.new_empty((0, linear.in_features))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self.packed, self.bias, "none", [], ""
        )
        return product


def pack_linear_layers(model: nn.Module) -> int:
    """Replace the plain linear layers of `model`; returns the bytes that are there twice now.

    One layer is packed at a time and its own weight dropped, so no more than one is ever there
    twice, except a weight that is shared with something else, as an output layer's with the
    embedding.
    """
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    doubled_bytes = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and can_pack(child.weight.dtype):
                if users[id(child.weight)] > 1:
                    doubled_bytes += child.weight.nbytes
                parent._modules[name] = PackedLinear(child)
                del child
    return doubled_bytes
