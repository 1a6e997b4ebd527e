"""All that is fused of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from pagedkv.engine.device import current, give_back_unused
from pagedkv.engine.fused.gates import fuse_expert_gates, fuse_gates
from pagedkv.engine.fused.merged_linear import merge_linear_layers
from pagedkv.engine.fused.norms import fuse_norms
from pagedkv.engine.fused.rotary import fuse_rotary


@dataclass(frozen=True)
class FusedLayers:
    """How many modules of a model compute otherwise than by their own code."""

    norms: int = 0
    gates: int = 0
    linear: int = 0
    """Linear layers that are multiplied with others, besides those of `gates`."""
    rotary: int = 0
    """Functions that turn heads by their positions: one for all layers, as a rule."""


def fuse_layers(model: nn.Module, run: Callable[[], object]) -> FusedLayers:
    """Fuse what can be fused of `model`, which is on a device that Triton compiles for.

    `run` computes it once, on any tokens. No weight is there twice afterwards; while it works,
    those of one layer are.
    """
    users = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    device = next(model.parameters()).device
    with current(device):
        gates = fuse_gates(model, users) + fuse_expert_gates(model)
        linear = merge_linear_layers(model, run, users)
        norms = fuse_norms(model)
        functions = fuse_rotary(model)
        run()  # in which these find out what they compute
        give_back_unused(device)
    return FusedLayers(norms, gates, linear, sum(function.is_fused for function in functions))
