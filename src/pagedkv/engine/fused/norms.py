"""RMS norms of a model, found by what they compute, and computed in one kernel each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from pagedkv.engine.fused.agreement import is_plain, random_numbers, same_formula, settings_of
from pagedkv.engine.fused.norm_kernel import normalize_rows

_LARGEST = 1 << 15
"""Numbers of a row: a program holds it all."""

_NUMBERS = 1024
"""Of several short rows, what one program takes."""


class NormForm(NamedTuple):
    """Which of the formulas that are called RMS norm."""

    is_weighted: bool
    is_plus_one: bool
    is_rounded_first: bool
    """Rounded to the model's dtype before it is multiplied by the weight, and again after."""


FORMS = (
    NormForm(True, False, True),
    NormForm(True, False, False),
    NormForm(True, True, False),
)
UNWEIGHTED = NormForm(False, False, False)


def normalized(x: torch.Tensor, weight: torch.Tensor, eps: float, form: NormForm) -> torch.Tensor:
    """`x` [..., n], each row by its root mean square and `weight` [n]; contiguous, in x's dtype.

    Rows may lie anywhere, if each is contiguous itself.
    """
    size = x.shape[-1]
    num_inner, outer_stride, inner_stride = 1, size, 0
    if not x.is_contiguous():
        if x.dim() == 4 and x.shape[0] == 1 and x.stride(3) == 1:
            num_inner, outer_stride, inner_stride = x.shape[2], x.stride(1), x.stride(2)
        elif x.dim() == 3 and x.shape[0] == 1 and x.stride(2) == 1:
            outer_stride = x.stride(1)
        elif x.dim() == 2 and x.stride(1) == 1:
            outer_stride = x.stride(0)
        else:
            x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = x.numel() // size
    if not num_rows:
        return out
    padded, rows, num_warps = _program(size)
    normalize_rows[(-(-num_rows // rows),)](
        out,
        x,
        weight,
        num_rows,
        num_inner,
        outer_stride,
        inner_stride,
        eps,
        SIZE=size,
        PADDED=padded,
        ROWS=rows,
        WEIGHTED=form.is_weighted,
        PLUS_ONE=form.is_plus_one,
        ROUNDED_FIRST=form.is_rounded_first,
        num_warps=num_warps,
        enable_fp_fusion=False,
    )
    return out


def _program(size: int) -> tuple[int, int, int]:
    """A row up to a power of two, rows a program, and its warps."""
    padded = 1 << (size - 1).bit_length()
    rows = max(1, _NUMBERS // padded)
    return padded, rows, max(1, min(16, rows * padded // 256))


def fuse_norms(model: nn.Module) -> int:
    """Let the RMS norms of `model` compute in one kernel each; returns how many do."""
    known: dict[Any, NormForm | None] = {}
    like = next(model.parameters())
    count = 0
    for module in model.modules():
        eps = _eps_of(module)
        if eps is None:
            continue
        key = settings_of(module)
        if key not in known:
            known[key] = _form_of(module, eps, like)
        form = known[key]
        if form is not None:
            module.forward = _forward(module, eps, form, like.dtype)
            count += 1
    return count


def _eps_of(module: nn.Module) -> float | None:
    """The eps of what may be an RMS norm; None for what is not."""
    parameters = dict(module.named_parameters())
    if "Norm" not in type(module).__name__ or type(module).__module__.startswith("torch."):
        return None
    if not is_plain(module) or list(module.children()) or set(parameters) - {"weight"}:
        return None
    weight = parameters.get("weight")
    if weight is not None and (weight.dim() != 1 or not 1 < len(weight) <= _LARGEST):
        return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return eps if isinstance(eps, float) else None


def _form_of(module: nn.Module, eps: float, like: torch.Tensor) -> NormForm | None:
    """The form that gives what `module` gives; None where none of them does."""
    weight = dict(module.named_parameters()).get("weight")
    if weight is not None and weight.dtype != like.dtype:
        return None
    twin = copy.deepcopy(module)
    size = 48 if weight is None else len(weight)
    numbers = random_numbers(6, size, like=like)
    # Rows so small that eps counts, large ones, one beside zero, and nothing at all.
    numbers[1] *= eps**0.5
    numbers[2] *= 30
    numbers[3] += 3
    numbers[4] = 0
    factors = random_numbers(size, like=like, seed=1)
    with torch.inference_mode():
        if weight is not None:
            twin.weight = nn.Parameter(factors, requires_grad=False)
        try:
            expected = twin(numbers)
        except Exception:  # it takes something else than rows, and so is something else
            return None
        for form in (UNWEIGHTED,) if weight is None else FORMS:
            if same_formula(normalized(numbers, factors, eps, form), expected):
                return form
    return None


def _forward(
    module: nn.Module, eps: float, form: NormForm, dtype: torch.dtype
) -> Callable[..., Any]:
    original = module.forward
    weight = dict(module.named_parameters()).get("weight")
    if weight is None:

        def unweighted(x: torch.Tensor) -> Any:
            if x.dtype is not dtype or x.shape[-1] > _LARGEST:
                return original(x)
            return normalized(x, x, eps, form)

        return unweighted
    size = len(weight)

    def forward(x: torch.Tensor) -> Any:
        if x.dtype is not dtype or x.shape[-1] != size:
            return original(x)
        return normalized(x, weight, eps, form)

    return forward
