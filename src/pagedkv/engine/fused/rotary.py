"""Rotary position embedding in one kernel, in place of the function that attention modules call.

That function is a global of the module that defines a model, which other models of the process
share. So `forward` of an attention module is copied, with the same code, and only in what the copy
takes from there by name the function is another one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from pagedkv.engine.fused.agreement import is_plain, random_numbers, same_formula
from pagedkv.engine.fused.rotary_kernel import rotate_heads

_PROGRAM_NUMBERS = 1024


class RotaryForm(NamedTuple):
    """Which of the ways to turn pairs of numbers."""

    takes_neighbours: bool
    gives_neighbours: bool
    """Else halves."""
    is_half: bool
    """Whether a cosine is read for each pair, from the front, and not for each number."""
    in_float32: bool
    """Whether nothing is rounded on the way."""
    whole: bool
    """Whether all of a head is turned, even if there are cosines for half of it only."""


_HALVES = [RotaryForm(False, False, False, exact, False) for exact in (False, True)]
_HALF_WIDE = [RotaryForm(False, False, True, exact, True) for exact in (False, True)]
_NEIGHBOURS = [RotaryForm(True, True, True, exact, False) for exact in (False, True)]
_TO_HALVES = [RotaryForm(True, False, True, exact, False) for exact in (False, True)]
_NEIGHBOURS += [RotaryForm(True, True, False, exact, False) for exact in (False, True)]
FORMS = (*_HALVES, *_HALF_WIDE, *_NEIGHBOURS, *_TO_HALVES)


def rotated(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    form: RotaryForm,
    *,
    by_token: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`q` and `k` [1, heads, tokens, n], or with `by_token` [1, tokens, heads, n], turned.

    `cos` and `sin` [1, tokens, r]. What comes out lies by token in memory. Heads may lie anywhere,
    if each is contiguous.
    """
    if not by_token:
        q, k = q.transpose(1, 2), None if k is None else k.transpose(1, 2)
    _, tokens, q_heads, size = q.shape
    k_heads = 0 if k is None else k.shape[2]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = None if k is None else torch.empty(k.shape, dtype=k.dtype, device=k.device)
    keys, keys_out = (q, q_out) if k is None or k_out is None else (k, k_out)
    width = cos.shape[-1]
    turned = 2 * width if form.whole else width
    half = turned // 2
    in_step, in_second = (2, 1) if form.takes_neighbours else (1, half)
    pairs = 1 << max(0, half - 1).bit_length()
    heads = max(1, _PROGRAM_NUMBERS // (2 * pairs))
    if tokens:
        rotate_heads[(tokens, -(-q_heads // heads) - (-k_heads // heads))](
            q_out,
            keys_out,
            q,
            keys,
            cos,
            sin,
            q_out.stride(1),
            q_out.stride(2),
            keys_out.stride(1),
            keys_out.stride(2),
            q.stride(1),
            q.stride(2),
            keys.stride(1),
            keys.stride(2),
            cos.stride(1),
            sin.stride(1),
            Q_HEADS=q_heads,
            K_HEADS=k_heads,
            HEADS=heads,
            SIZE=size,
            ROTATED=turned,
            PAIRS=pairs,
            REST=1 << max(0, size - turned - 1).bit_length(),
            COS_STEP=1 if form.is_half else in_step,
            COS_SECOND=0 if form.is_half else in_second,
            IN_STEP=in_step,
            IN_SECOND=in_second,
            OUT_STEP=2 if form.gives_neighbours else 1,
            OUT_SECOND=1 if form.gives_neighbours else half,
            IN_FLOAT32=form.in_float32,
            num_warps=max(1, min(4, heads * pairs // 64)),
            enable_fp_fusion=False,
        )
    if by_token:
        return q_out, k_out
    return q_out.transpose(1, 2), None if k_out is None else k_out.transpose(1, 2)


class RotaryFunction:
    """In place of one function of a model: proves at the first call of a kind what it computes."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        self._default = inspect.signature(original).parameters["unsqueeze_dim"].default
        self._forms: dict[Any, RotaryForm | None] = {}

    @property
    def is_fused(self) -> bool:
        """Whether some kind of call computes in one kernel."""
        return any(form is not None for form in self._forms.values())

    def _form(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        dim: int,
    ) -> RotaryForm | None:
        """How this call is computed in one kernel; None where it is not."""
        size, width = q.shape[-1], cos.shape[-1]
        if q.dim() != 4 or q.shape[0] != 1 or cos.dim() != 3 or cos.shape != sin.shape:
            return None
        if dim not in (1, 2) or cos.shape[:2] != (1, q.shape[3 - dim]):
            return None
        if q.stride(3) != 1 or cos.stride(2) != 1 or sin.stride(2) != 1:
            return None
        if k is not None and (
            k.dtype is not q.dtype
            or k.shape != (1, k.shape[1], k.shape[2], size)
            or k.shape[3 - dim] != q.shape[3 - dim]
            or k.stride(3) != 1
        ):
            return None
        kind = (q.dtype, cos.dtype, sin.dtype, size, width, dim, k is None)
        if kind not in self._forms:
            self._forms[kind] = self._found(q, k, cos, sin, dim)
        return self._forms[kind]

    def _found(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        dim: int,
    ) -> RotaryForm | None:
        size, width = q.shape[-1], cos.shape[-1]
        shape = (1, 3, 5, size) if dim == 2 else (1, 5, 3, size)
        queries = random_numbers(*shape, like=q)
        keys = None if k is None else random_numbers(*shape, like=q, seed=1)
        # Of any size, and not repeated: a form may read no cosine that the function does not.
        cosines = random_numbers(1, 3, width, like=cos, seed=2)
        sines = random_numbers(1, 3, width, like=sin, seed=3)
        with torch.inference_mode():
            given = [queries] if keys is None else [queries, keys]
            try:
                expected = self._original(*given, cosines, sines, unsqueeze_dim=dim)
            except Exception:  # it takes something else, and so is something else
                return None
            expected = (expected,) if keys is None else expected
            for form in FORMS:
                turned = 2 * width if form.whole else width
                if turned > size or turned % 2:
                    continue
                if form.in_float32 and q.dtype == torch.float32:
                    continue
                found = rotated(queries, keys, cosines, sines, form, by_token=dim == 2)
                if all(same_formula(a, b) for a, b in zip(found, expected)):
                    return form
        return None


class RotaryOfBoth(RotaryFunction):
    """In place of a function of queries, keys, cosines and sines."""

    def __call__(self, q: Any, k: Any, cos: Any, sin: Any, *rest: Any, **named: Any) -> Any:
        """Queries and keys, turned."""
        dim = named.get("unsqueeze_dim", self._default)
        if not rest and k is not None and len(named) == ("unsqueeze_dim" in named):
            form = self._form(q, k, cos, sin, dim)
            if form is not None:
                return rotated(q, k, cos, sin, form, by_token=dim == 2)
        return self._original(q, k, cos, sin, *rest, **named)


class RotaryOfOne(RotaryFunction):
    """In place of a function of queries or keys, cosines and sines."""

    def __call__(self, x: Any, cos: Any, sin: Any, *rest: Any, **named: Any) -> Any:
        """Queries or keys, turned."""
        dim = named.get("unsqueeze_dim", self._default)
        if not rest and len(named) == ("unsqueeze_dim" in named):
            form = self._form(x, None, cos, sin, dim)
            if form is not None:
                return rotated(x, None, cos, sin, form, by_token=dim == 2)[0]
        return self._original(x, cos, sin, *rest, **named)


def fuse_rotary(model: nn.Module) -> list[RotaryFunction]:
    """Let attention modules call another function to turn heads; returns those functions.

    What each computes is found out at its first call.
    """
    made: dict[Any, RotaryFunction] = {}
    copies: dict[Any, Any] = {}
    for module in model.modules():
        if not is_plain(module):
            continue
        whole = type(module).forward
        innermost = inspect.unwrap(whole)
        if not isinstance(innermost, FunctionType):
            continue
        if whole not in copies:
            names = {}
            for name in innermost.__code__.co_names:
                function = innermost.__globals__.get(name)
                make = _kind_of(function)
                if function is not None and make is not None:
                    names[name] = made.setdefault(function, make(function))
            copies[whole] = _with_names(whole, names) if names else None
        copied = copies[whole]
        if copied is not None:
            module.forward = MethodType(copied, module)
    return list(made.values())


def _kind_of(function: Any) -> type[RotaryFunction] | None:
    """What takes the place of `function`, by its arguments; None if nothing does."""
    if not callable(function) or inspect.isclass(function):
        return None
    try:
        arguments = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    if "unsqueeze_dim" not in arguments:
        return None
    if arguments[:4] == ["q", "k", "cos", "sin"]:
        return RotaryOfBoth
    return RotaryOfOne if arguments[:3] == ["x", "cos", "sin"] else None


def _with_names(function: Any, names: dict[str, Any]) -> Any:
    """A copy of `function` that finds `names` before its globals, within what it wraps too.

    None where what it wraps is out of reach.
    """
    closure = function.__closure__
    wrapped = getattr(function, "__wrapped__", None)
    scope = function.__globals__
    if wrapped is None:
        scope = {**scope, **names}
    else:
        inner = _with_names(wrapped, names)
        cells = [cell for cell in closure or () if cell.cell_contents is wrapped]
        if inner is None or len(cells) != 1:
            return None
        closure = tuple(CellType(inner) if cell is cells[0] else cell for cell in closure)
    copied = FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, closure
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__dict__.update(function.__dict__)
    if wrapped is not None:
        copied.__wrapped__ = inner  # type: ignore[attr-defined]
    return copied
