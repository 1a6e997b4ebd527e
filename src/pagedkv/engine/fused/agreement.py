"""Whether two ways of computing something are the same one: asked of numbers, not of names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_OTHERWISE_ROUNDED = 1 / 64
"""The share of half-precision results that may be another, by one in their last place: sums that
are added up in another order now and then fall on the other side. A formula that rounds in other
places, but is right otherwise, differs in a third or so of its results."""

_FLOAT32_RELATIVE = 1e-5
_FLOAT32_ABSOLUTE = 1e-6
"""Of the largest: where numbers cancel out, what is left has no more digits than that."""

_WHOLE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def same_formula(found: Any, expected: Any) -> bool:
    """Whether `found` is `expected`, but for the last place of few numbers; in dtype too."""
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        return False
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    a, b = found.double(), expected.double()
    if not bool(torch.isfinite(b).all()):
        return False
    apart, size = (a - b).abs(), b.abs()
    if found.dtype == torch.float32:
        bound = _FLOAT32_RELATIVE * size + _FLOAT32_ABSOLUTE * size.max()
        return bool((apart <= bound).all())
    facts = torch.finfo(found.dtype)
    one_place = 2 * facts.eps * size + facts.smallest_normal
    is_near = bool((apart <= one_place).all())
    return is_near and float((apart > 0).double().mean()) <= _OTHERWISE_ROUNDED


def same_product(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether `found` is `expected`, as near as matrix products of their dtype come."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    a, b = found.double(), expected.double()
    return bool((a - b).norm() <= _WHOLE[found.dtype] * b.norm())


def random_numbers(*shape: int, like: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Normally distributed, of the dtype and on the device of `like`, and always the same."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(like.device, like.dtype)


def settings_of(module: nn.Module) -> tuple[Any, ...]:
    """All that two modules of one class may differ in, besides their weights and parts."""
    plain = (bool, int, float, str, type(None))
    named = tuple((name, v) for name, v in vars(module).items() if isinstance(v, plain))
    shapes = tuple((name, p.shape, p.dtype) for name, p in module.named_parameters())
    parts = tuple((name, type(part)) for name, part in module.named_children())
    return type(module), named, shapes, parts


def is_plain(module: nn.Module) -> bool:
    """Whether calling `module` calls the `forward` of its class, and nothing else."""
    return "forward" not in vars(module) and not (
        module._forward_hooks or module._forward_pre_hooks
    )
