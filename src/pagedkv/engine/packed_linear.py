"""Linear layers whose weights are laid out once, as this machine multiplies few rows best.

Generating multiplies large weights by few rows at a time, and a weight as a checkpoint has it is
rearranged in every such product. Float32 goes into panels (`panel_product.py`). Half precision
goes to oneDNN, which knows the matrix units that some CPUs have for it.
"""

from __future__ import annotations

import ctypes

import torch
from numba.core import config
from torch import nn

from pagedkv.attention.threads import Threads
from pagedkv.engine import panel_product
from pagedkv.engine.panel_product import PANEL, multiply_task

_ONEDNN_ROWS = 16
"""The rows that oneDNN's layout is chosen for; one chosen for 1 or 64 is slower at 4 to 64."""

_Numbers = ctypes.c_int64 * (panel_product.PIECES + 1)

_PIECES_EACH = 4
"""Pieces of a product for each thread, so that none waits long for one that was held up."""


class PanelLinear(nn.Module):
    """`nn.Linear` in float32 with its weight in panels; the other is gone unless it is shared.

    What it gives for a row is the same, bit for bit, whatever other rows there are.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias, requires_grad=False)
        # Models ask a layer's weight for its dtype and device. It holds nothing.
        self.weight = linear.weight.new_empty((0, linear.in_features))
        self._panels = panel_product.packed(linear.weight.detach().numpy())
        # Asking a module for a parameter takes longer than asking for a number.
        self._bias_address = 0 if self.bias is None else self.bias.data_ptr()
        self._panels_address = self._panels.ctypes.data
        self._spare = PANEL if self.out_features % PANEL else 0
        self._threads = Threads(torch.get_num_threads())
        num_panels = -(-self.out_features // PANEL)
        self._pieces = min(num_panels, _PIECES_EACH * self._threads.most)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        rows = rows.contiguous()
        count = rows.numel() // self.in_features
        out = rows.new_empty(count * (self.out_features + self._spare))
        numbers = _Numbers(
            0,
            rows.data_ptr(),
            count,
            self.in_features,
            self._panels_address,
            self._bias_address,
            int(self._bias_address != 0),
            out.data_ptr(),
            self.out_features,
            self._pieces,
        )
        if count:
            self._threads.run(multiply_task, numbers, self._threads.most)
        if self._spare:
            out = out[: count * self.out_features]
        return out.view(*rows.shape[:-1], self.out_features)


class OneDNNLinear(nn.Module):
    """`nn.Linear` with its weight as oneDNN keeps it; the other is gone unless it is shared."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        weight = linear.weight.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ONEDNN_ROWS)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias, requires_grad=False)
        # Models ask a layer's weight for its dtype and device. It holds nothing.
        self.weight = linear.weight.new_empty((0, linear.in_features))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self.packed, self.bias, "none", [], ""
        )
        return product


def packed_form(linear: nn.Linear) -> type[PanelLinear] | type[OneDNNLinear] | None:
    """What `linear` is best replaced by on this machine; None: nothing."""
    dtype = linear.weight.dtype
    if dtype == torch.float32:
        is_possible = linear.in_features % 4 == 0 and not config.DISABLE_JIT
        return PanelLinear if is_possible else None
    mkldnn = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not (
        hasattr(mkldnn, "_reorder_linear_weight") and hasattr(mkldnn, "_linear_pointwise")
    ):
        return None
    if dtype == torch.bfloat16:
        return OneDNNLinear if mkldnn._is_mkldnn_bf16_supported() else None
    if dtype == torch.float16:
        return OneDNNLinear if mkldnn._is_mkldnn_fp16_supported() else None
    return None


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
            form = packed_form(child) if type(child) is nn.Linear else None
            if form is not None:
                if users[id(child.weight)] > 1:
                    doubled_bytes += child.weight.nbytes
                parent._modules[name] = form(child)
                del child
    return doubled_bytes
