"""Linear layers of one input, multiplied at once: queries, keys and values, or gate and up.

Their weights are laid behind one another, and each layer's own weight is from then on a part of
that: nothing is there twice. The code of the model still calls one layer after the other. The
first that is called with an input computes the product for all, and the others find theirs there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional

from pagedkv.engine.fused.agreement import is_plain


class MergedLinear:
    """Layers [n_i, inputs] as one of [sum of n_i, inputs]. All have a bias, or none has."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.sizes = [layer.out_features for layer in layers]
        with torch.no_grad():
            self._weight = _laid_out([layer.weight for layer in layers])
            self._bias = None
            if layers[0].bias is not None:
                self._bias = _laid_out([layer.bias for layer in layers])
        self._input: torch.Tensor | None = None
        self._parts: list[torch.Tensor | None] = []
        self._left = 0

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] to [..., sum of n_i]."""
        return functional.linear(x, self._weight, self._bias)

    def forward_of(self, part: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """What the layer of that number computes: a view into the product of all."""

        def forward(x: torch.Tensor) -> torch.Tensor:
            found = self._parts[part] if x is self._input else None
            if found is None:  # the first of them, or one that is asked again
                self._parts = list(self.product(x).split(self.sizes, -1))
                self._input, self._left = x, len(self._parts)
                found = self._parts[part]
            assert found is not None
            self._parts[part] = None
            self._left -= 1
            if not self._left:  # and the input may go
                self._input = None
            return found

        return forward


def _laid_out(parameters: list[nn.Parameter]) -> torch.Tensor:
    """All of `parameters` behind one another; each is a view of it afterwards."""
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(
        parameters, whole.split([len(parameter) for parameter in parameters]), strict=True
    ):
        parameter.data = part
    return whole


def can_merge(layers: Sequence[nn.Module], users: dict[int, int]) -> bool:
    """Whether `layers` are plain ones that go together; `users` counts who has a parameter."""
    first = layers[0]
    return all(
        type(layer) is nn.Linear
        and is_plain(layer)
        and users[id(layer.weight)] == 1
        and layer.in_features == first.in_features
        and layer.weight.dtype == first.weight.dtype
        and layer.weight.device == first.weight.device
        and (layer.bias is None) == (first.bias is None)
        for layer in layers
    )


def merge_linear_layers(model: nn.Module, run: Callable[[], object], users: dict[int, int]) -> int:
    """Merge what `run`, which computes `model` once, is seen to give one input; returns how many.

    Only the layers of one module, each called once, so that nothing else has to be known of it.
    """
    seen: dict[nn.Module, list[torch.Tensor]] = {}

    def note(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen.setdefault(layer, []).append(inputs[0])

    handles = [
        module.register_forward_pre_hook(note)
        for module in model.modules()
        if type(module) is nn.Linear and is_plain(module)
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    count = 0
    for parent in model.modules():
        together: dict[int, list[nn.Linear]] = {}
        for child in parent.children():
            inputs = seen.get(child, ())
            if len(inputs) == 1:
                together.setdefault(id(inputs[0]), []).append(child)
        for layers in together.values():
            if len(layers) > 1 and can_merge(layers, users):
                merged = MergedLinear(layers)
                for part, layer in enumerate(layers):
                    layer.forward = merged.forward_of(part)
                count += len(layers)
    return count
