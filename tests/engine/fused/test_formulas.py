"""Only what is shown to compute the same is replaced; any other formula stays the model's own."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("transformers", reason="needs the extra [engine]")
pytest.importorskip("triton", reason="triton is not installed")

import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from models.gpu_batch import DEVICE
from models.tiny_models import tiny_model
from pagedkv.engine.fused.agreement import same_formula
from pagedkv.engine.fused.gates import fuse_expert_gates, fuse_gates
from pagedkv.engine.fused.merged_linear import merge_linear_layers
from pagedkv.engine.fused.norms import fuse_norms
from pagedkv.engine.fused.rotary import RotaryOfBoth, fuse_rotary
from pagedkv.engine.model import PagedModel

HALF_AND_WHOLE = [torch.float32, torch.bfloat16, torch.float16]


OTHERS = ("centred", "eps outside", "no eps", "sum", "by half a row", "2 - weight", "with a gate")


class SomeNorm(nn.Module):
    """RMS norm, unless a formula says otherwise."""

    def __init__(self, formula: str, size: int = 48) -> None:
        super().__init__()
        self.formula = formula
        self.eps = 1e-5
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.float()
        square, eps = rows.pow(2).mean(-1, keepdim=True), self.eps
        match self.formula:
            case "rms":
                return self.weight * (rows * torch.rsqrt(square + eps)).to(x.dtype)
            case "rounded once":
                return (self.weight * (rows * torch.rsqrt(square + eps))).to(x.dtype)
            case "1 + weight":
                scaled = rows * torch.rsqrt(square + eps)
                return (scaled * (1 + self.weight.float())).to(x.dtype)
            case "centred":
                return functional.layer_norm(x, x.shape[-1:], self.weight, eps=eps)
            case "eps outside":
                return self.weight * (rows / (square.sqrt() + eps)).to(x.dtype)
            case "no eps":
                return self.weight * (rows / square.sqrt().clamp(min=1e-30)).to(x.dtype)
            case "sum":
                return self.weight * (rows / (square * x.shape[-1] + eps).sqrt()).to(x.dtype)
            case "wide":
                return self.weight.float() * rows * torch.rsqrt(square + eps)
            case "by half a row":
                halves = rows.unflatten(-1, (2, -1))
                mean = halves.pow(2).mean(-1, keepdim=True)
                return self.weight * (halves * torch.rsqrt(mean + eps)).flatten(-2).to(x.dtype)
            case "2 - weight":
                return (2 - self.weight) * (rows * torch.rsqrt(square + eps)).to(x.dtype)
            case "with a gate":
                raise TypeError("a gate is missing")
        raise AssertionError(self.formula)


def placed(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    return nn.ModuleList([module]).to(DEVICE, dtype).eval()


@pytest.mark.parametrize("dtype", HALF_AND_WHOLE)
@pytest.mark.parametrize("formula", ["rms", "rounded once", "1 + weight"])
@pytest.mark.parametrize("size", [48, 65])
def test_each_rms_norm_is_found_and_rounds_as_it_did(
    formula: str, dtype: torch.dtype, size: int
) -> None:
    torch.manual_seed(0)
    held = placed(SomeNorm(formula, size), dtype)
    x = torch.randn(40, size, device=DEVICE, dtype=dtype)
    with torch.inference_mode():
        expected = held[0](x)
        assert fuse_norms(held) == 1
        found = held[0](x)
    assert same_formula(found, expected)
    assert float((found != expected).double().mean()) <= (1.0 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize(
    ("formula", "dtype"),
    [
        *((formula, dtype) for formula in OTHERS for dtype in (torch.float32, torch.bfloat16)),
        ("wide", torch.bfloat16),  # in float32 it is the same
    ],
)
def test_another_norm_is_left_alone(formula: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    held = placed(SomeNorm(formula), dtype)
    assert fuse_norms(held) == 0 and "forward" not in vars(held[0])


def test_norms_of_one_class_with_other_settings_are_looked_at_one_by_one() -> None:
    held = nn.ModuleList([SomeNorm("rms"), SomeNorm("centred"), SomeNorm("rms")]).to(DEVICE)
    assert fuse_norms(held) == 2 and "forward" not in vars(held[1])


def test_a_module_that_was_given_another_forward_is_left_alone() -> None:
    held = nn.ModuleList([SomeNorm("rms"), SomeNorm("rms")]).to(DEVICE)
    forward = held[0].forward
    held[0].forward = lambda x: 2 * forward(x)
    held[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    assert fuse_norms(held) == 0


def test_a_norm_that_is_given_another_dtype_computes_by_its_own_code() -> None:
    held = placed(SomeNorm("rms", 64), torch.bfloat16)
    assert fuse_norms(held) == 1
    x = torch.randn(3, 64, device=DEVICE)
    assert torch.equal(held[0](x), SomeNorm.forward(held[0], x))


class SomeMLP(nn.Module):
    """A gated layer, unless a formula says otherwise."""

    def __init__(self, formula: str, act_fn: nn.Module | None = None, bias: bool = False) -> None:
        super().__init__()
        self.formula = formula
        self.act_fn = act_fn or nn.SiLU()
        self.gate_proj = nn.Linear(24, 40, bias=bias)
        self.up_proj = nn.Linear(24, 40, bias=bias)
        self.down_proj = nn.Linear(40, 24, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        match self.formula:
            case "gated":
                return self.down_proj(self.act_fn(gate) * up)
            case "swapped":
                return self.down_proj(self.act_fn(up) * gate)
            case "sparse":
                return self.down_proj(self.act_fn(gate.relu()) * up)
            case "scaled":
                return self.down_proj(self.act_fn(gate) * (up + 1))
        raise AssertionError(self.formula)


def users_of(model: nn.Module) -> dict[int, int]:
    return {id(parameter): 1 for parameter in model.parameters()}


@pytest.mark.parametrize("dtype", HALF_AND_WHOLE)
@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU(approximate="tanh")], ids=["silu", "gelu"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_layer_is_fused_and_its_weights_are_there_once(
    dtype: torch.dtype, act: nn.Module, bias: bool
) -> None:
    torch.manual_seed(0)
    held = placed(SomeMLP("gated", act, bias), dtype)
    mlp: Any = held[0]
    x = torch.randn(1, 5, 24, device=DEVICE, dtype=dtype)
    before = {name: weight.clone() for name, weight in held.state_dict().items()}
    with torch.inference_mode():
        expected = mlp(x)
        assert fuse_gates(held, users_of(held)) == 1
        found = mlp(x)
    bound = {torch.float32: 1e-6, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(found, expected, atol=bound, rtol=0)
    for name, weight in held.state_dict().items():
        assert torch.equal(weight, before[name])
    assert mlp.up_proj.weight.data_ptr() == mlp.gate_proj.weight.data_ptr() + 24 * 40 * x.itemsize


@pytest.mark.parametrize("formula", ["swapped", "sparse", "scaled"])
def test_another_gated_layer_is_left_alone(formula: str) -> None:
    torch.manual_seed(0)
    held = placed(SomeMLP(formula), torch.float32)
    x = torch.randn(1, 5, 24, device=DEVICE)
    expected = held[0](x)
    assert fuse_gates(held, users_of(held)) == 0
    torch.testing.assert_close(held[0](x), expected)


@pytest.mark.parametrize(
    "act", [nn.GELU(), nn.ReLU(), nn.PReLU(), nn.Sigmoid(), nn.Tanh(), nn.Hardswish()]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_with_another_activation_is_left_alone(act: nn.Module, dtype: torch.dtype) -> None:
    held = placed(SomeMLP("gated", act), dtype)
    assert fuse_gates(held, users_of(held)) == 0


class SomeExperts(nn.Module):
    """Gates as experts do, unless a formula says otherwise."""

    def __init__(self, formula: str, act: nn.Module) -> None:
        super().__init__()
        self.formula, self.act_fn = formula, act
        self.weight = nn.Parameter(torch.ones(1))

    def _apply_gate(self, halves: torch.Tensor) -> torch.Tensor:
        gate, up = halves.chunk(2, -1)
        if self.formula == "interleaved":
            gate, up = halves[..., ::2], halves[..., 1::2]
        elif self.formula == "swapped":
            gate, up = up, gate
        elif self.formula == "cut off":
            up = up.clamp(-7, 7)
        elif self.formula == "of three":
            raise ValueError("three parts are needed")
        return self.act_fn(gate) * up


@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU("tanh")])
@pytest.mark.parametrize("dtype", HALF_AND_WHOLE)
def test_experts_gate_in_one_kernel(act: nn.Module, dtype: torch.dtype) -> None:
    held = placed(SomeExperts("gated", act), dtype)
    halves = torch.randn(5, 2 * 24, device=DEVICE).to(dtype)
    expected = held[0]._apply_gate(halves)
    other = held[0]._apply_gate(halves.double())
    assert fuse_expert_gates(held) == 1 and fuse_expert_gates(held) == 0
    assert same_formula(held[0]._apply_gate(halves), expected)
    assert torch.equal(held[0]._apply_gate(halves.double()), other)


@pytest.mark.parametrize("formula", ["interleaved", "swapped", "cut off", "of three"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_that_gate_otherwise_are_left_alone(formula: str, dtype: torch.dtype) -> None:
    assert fuse_expert_gates(placed(SomeExperts(formula, nn.SiLU()), dtype)) == 0


def test_experts_of_two_activations_in_one_class_are_told_apart() -> None:
    parts = [SomeExperts("gated", nn.GELU(kind)) for kind in ("none", "tanh")]
    held = nn.Sequential(*parts).to(DEVICE)
    assert fuse_expert_gates(held) == 1 and "_apply_gate" in vars(held[1])


def test_weights_that_something_else_uses_too_stay_where_they_are() -> None:
    held = placed(SomeMLP("gated"), torch.float32)
    users = users_of(held)
    users[id(held[0].up_proj.weight)] = 2
    assert fuse_gates(held, users) == 0


class Projections(nn.Module):
    """Three linear layers, given what the test says."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(12, size, bias=i == 9) for i, size in enumerate(sizes)]
        )

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x) for layer, x in zip(self.layers, inputs)]


def test_layers_that_are_given_one_input_are_multiplied_at_once() -> None:
    torch.manual_seed(0)
    model = Projections(8, 3, 5).to(DEVICE)
    x, y = torch.randn(2, 4, 12, device=DEVICE).unbind()
    with torch.inference_mode():
        expected = [model(x, x, y), model(y, y, y), model(x, y, x)]
        assert merge_linear_layers(model, lambda: model(x, x, y), users_of(model)) == 2
        products = []
        linear = functional.linear
        for inputs, wanted in zip([(x, x, y), (y, y, y), (x, y, x)], expected):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(functional, "linear", lambda *a: products.append(1) or linear(*a))
                found = model(*inputs)
            for a, b in zip(found, wanted):
                torch.testing.assert_close(a, b)
    # The pair at once, twice; then each of it alone, since their inputs differ.
    assert len(products) == 2 + 2 + 3


def test_a_part_that_is_asked_twice_is_computed_again() -> None:
    torch.manual_seed(0)
    model = Projections(8, 3).to(DEVICE)
    x = torch.randn(4, 12, device=DEVICE)
    with torch.inference_mode():
        expected = model(x, x)[0]
        merge_linear_layers(model, lambda: model(x, x), users_of(model))
        first = model.layers[0](x)
        first.zero_()
        torch.testing.assert_close(model.layers[0](x), expected)


def test_nothing_is_kept_of_an_input_once_all_parts_are_taken() -> None:
    model = Projections(8, 3).to(DEVICE)
    x = torch.randn(4, 12, device=DEVICE)
    merge_linear_layers(model, lambda: model(x, x), users_of(model))
    model(x, x)
    (merged,) = {cell.cell_contents for cell in model.layers[0].forward.__closure__
                 if not isinstance(cell.cell_contents, int)}  # fmt: skip
    assert merged._input is None and merged._parts == [None, None]


def turned_otherwise(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos - modeling_llama.rotate_half(q) * sin, k * cos + k * sin


def test_heads_that_are_turned_otherwise_are_turned_by_the_models_own_code() -> None:
    turning = RotaryOfBoth(turned_otherwise)
    q, k = (torch.randn(1, heads, 4, 16, device=DEVICE) for heads in (3, 2))
    cos, sin = torch.randn(2, 1, 4, 16, device=DEVICE).unbind()
    found = turning(q, k, cos, sin)
    assert not turning.is_fused
    for a, b in zip(found, turned_otherwise(q, k, cos, sin)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("what", ["batch", "angles for all heads", "one more argument", "no key"])
def test_a_call_of_another_kind_is_computed_by_the_models_own_code(what: str) -> None:
    def original(q, k, cos, sin, unsqueeze_dim=1, more=None):
        return "its own"

    turning = RotaryOfBoth(original)
    sizes, rest = {"batch": (2, 3, 4, 16)}.get(what, (1, 3, 4, 16)), {}
    q = torch.randn(*sizes, device=DEVICE)
    cos = torch.randn(*((1, 5, 16) if what == "angles for all heads" else (1, 4, 16)))
    if what == "one more argument":
        rest["more"] = 1
    assert turning(q, None if what == "no key" else q, cos, cos, **rest) == "its own"


def test_other_models_of_the_process_go_on_calling_the_function_that_they_have() -> None:
    own = modeling_qwen3.apply_rotary_pos_emb
    forward = modeling_qwen3.Qwen3Attention.forward
    other = tiny_model("qwen3")
    mine = PagedModel(tiny_model("qwen3").to(DEVICE), triton=True)
    assert mine.fused is not None and mine.fused.rotary == 1
    assert modeling_qwen3.apply_rotary_pos_emb is own
    assert modeling_qwen3.Qwen3Attention.forward is forward
    assert not any("forward" in vars(module) for module in other.modules())


def test_the_switch_leaves_the_model_as_it_is() -> None:
    model = PagedModel(tiny_model("qwen3").to(DEVICE), triton=True, fused_layers=False)
    assert model.fused is None
    assert not any("forward" in vars(module) for module in model._model.modules())


def test_a_function_that_nobody_turns_heads_with_is_not_taken_for_one() -> None:
    assert fuse_rotary(tiny_model("gpt2")) == []
