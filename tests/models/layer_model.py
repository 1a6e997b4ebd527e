"""What the fused layers compute, in float64 and one number after the other."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

RELATIVE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def in_float64(tensor: torch.Tensor) -> NDArray[np.float64]:
    return np.asarray(tensor.double().cpu().numpy())


def normalized_model(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, plus_one: bool = False
) -> NDArray[np.float64]:
    rows = in_float64(x)
    found = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + eps)
    if weight is None:
        return found
    return found * (in_float64(weight) + (1.0 if plus_one else 0.0))


def rotated_model(
    heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, places: list[tuple[int, ...]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """`heads` [tokens, heads, n] turned, and how large the parts of each number's sum are.

    `places`: for each pair where its two numbers are, where their cosines, and where they go.
    """
    x, c, s = in_float64(heads), in_float64(cos)[:, None], in_float64(sin)[:, None]
    found, sizes = x.copy(), np.abs(x)
    for a, b, angle_a, angle_b, to_a, to_b in places:
        for to, parts in (
            (to_a, (x[..., a] * c[..., angle_a], -x[..., b] * s[..., angle_a])),
            (to_b, (x[..., b] * c[..., angle_b], x[..., a] * s[..., angle_b])),
        ):
            found[..., to] = sum(parts)
            sizes[..., to] = sum(map(np.abs, parts))
    return found, sizes


def gated_model(halves: torch.Tensor, is_gelu: bool) -> NDArray[np.float64]:
    gate, up = np.split(in_float64(halves), 2, axis=-1)
    # (1 + tanh(z)) / 2, in the form that loses no digits where it is small.
    x = 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3) if is_gelu else gate
    return gate / (1 + np.exp(-x)) * up
