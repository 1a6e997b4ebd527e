"""Gated feed-forward layers: the two halves in one product, the gate and its product in one kernel.

down_proj(act(gate_proj(x)) * up_proj(x))      or with gate_up_proj for both

Experts are multiplied as groups by torch, and keep that; of theirs only the gate is another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pagedkv.engine.fused.agreement import (
    is_plain,
    random_numbers,
    same_formula,
    same_product,
    settings_of,
)
from pagedkv.engine.fused.gate_kernel import multiply_by_gate
from pagedkv.engine.fused.merged_linear import MergedLinear, can_merge

_BLOCK = 1024
"""Numbers of a row that a program takes."""

_Product = Callable[[torch.Tensor], torch.Tensor]


def gated(halves: torch.Tensor, is_gelu: bool) -> torch.Tensor:
    """`halves` [..., 2 * n]: the activated first n numbers of each row times the others.

    The activation is SiLU or GELU by its tanh approximation. Contiguous, in the same dtype.
    """
    size = halves.shape[-1] // 2
    halves = halves.contiguous()
    out = torch.empty((*halves.shape[:-1], size), dtype=halves.dtype, device=halves.device)
    rows = out.numel() // size
    if rows:
        block = min(_BLOCK, 1 << (size - 1).bit_length())
        multiply_by_gate[(rows, -(-size // block))](
            out,
            halves,
            2 * size,
            SIZE=size,
            BLOCK=block,
            IS_GELU=is_gelu,
            num_warps=max(1, block // 256),
            enable_fp_fusion=False,
        )
    return out


def fuse_gates(model: nn.Module, users: dict[int, int]) -> int:
    """Fuse what is gated in `model`; returns how many are. `users` counts who has a parameter."""
    activations: dict[Any, bool | None] = {}
    known: dict[Any, bool] = {}
    like = next(model.parameters())
    count = 0
    for module in list(model.modules()):
        parts = dict(module.named_children())
        names = set(parts) - {"act_fn", "activation_fn"}
        (act,) = [parts[name] for name in set(parts) - names] or [None]
        if act is None or len(parts) != len(names) + 1 or not is_plain(module):
            continue
        if list(act.parameters()):
            continue
        kind = settings_of(act)
        if kind not in activations:
            activations[kind] = _is_gelu(act, like)
        is_gelu = activations[kind]
        if is_gelu is None:
            continue
        if names == {"gate_proj", "up_proj", "down_proj"}:
            halves = [parts["gate_proj"], parts["up_proj"]]
            if not can_merge(halves, users) or halves[0].out_features != halves[1].out_features:
                continue
            inputs, source = halves[0].in_features, halves
        elif names == {"gate_up_proj", "down_proj"} and type(parts["gate_up_proj"]) is nn.Linear:
            inputs, source = parts["gate_up_proj"].in_features, None
        else:
            continue
        down = parts["down_proj"]
        key = (*settings_of(module), kind)
        if known.get(key) is False:
            continue
        x = random_numbers(1, 3, inputs, like=like)
        with torch.inference_mode():
            expected = None if key in known else module(x)
        product = parts["gate_up_proj"] if source is None else MergedLinear(source).product
        forward = _forward(product, down, is_gelu)
        if expected is not None:
            with torch.inference_mode():
                known[key] = same_product(forward(x), expected)
        if known[key]:
            module.forward = forward
            count += 1
    return count


def fuse_expert_gates(model: nn.Module) -> int:
    """Let the experts of `model` gate in one kernel; returns how many layers of experts do.

    `transformers` gives each such layer a method that takes both halves of what was multiplied.
    """
    known: dict[Any, bool | None] = {}
    like = next(model.parameters())
    count = 0
    for module in model.modules():
        original = getattr(module, "_apply_gate", None)
        if not callable(original) or "_apply_gate" in vars(module):
            continue
        key = (settings_of(module), *map(settings_of, module.children()))
        if key not in known:
            known[key] = _is_gelu_in(original, like)
        is_gelu = known[key]
        if is_gelu is not None:
            module._apply_gate = _expert_gate(original, is_gelu, like.dtype)
            count += 1
    return count


def _is_gelu_in(gate: Callable[[torch.Tensor], Any], like: torch.Tensor) -> bool | None:
    """Which of the two activations is in `gate`; None where it computes something else."""
    halves = random_numbers(16, 192, like=like)
    # Some cut off what is large. Far below zero nothing is left but how it was rounded.
    halves[:4] *= 12
    halves[:4, :96].abs_()
    halves[4:8] *= 0.01
    with torch.inference_mode():
        try:
            expected = gate(halves)
        except Exception:  # it takes something else, and so is something else
            return None
        for is_gelu in (False, True):
            if same_formula(gated(halves, is_gelu), expected):
                return is_gelu
    return None


def _expert_gate(
    original: Callable[[torch.Tensor], Any], is_gelu: bool, dtype: torch.dtype
) -> Callable[[torch.Tensor], Any]:
    def gate(halves: torch.Tensor) -> Any:
        return gated(halves, is_gelu) if halves.dtype is dtype else original(halves)

    return gate


def _is_gelu(act: nn.Module, like: torch.Tensor) -> bool | None:
    """Which of the two activations `act` is; None for another."""
    halves = random_numbers(8, 192, like=like)
    with torch.inference_mode():
        try:
            expected = act(halves[:, :96]) * halves[:, 96:]
        except Exception:  # it takes something else than numbers, and so is something else
            return None
        for is_gelu in (False, True):
            if same_formula(gated(halves, is_gelu), expected):
                return is_gelu
    return None


def _forward(product: _Product, down: nn.Module, is_gelu: bool) -> Callable[..., Any]:
    def forward(x: torch.Tensor) -> Any:
        return down(gated(product(x), is_gelu))

    return forward
