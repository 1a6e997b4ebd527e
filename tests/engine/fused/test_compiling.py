"""The compiler's view of the fused layers' kernels, for a device that need not be here."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("triton", reason="needs triton")

import triton

from models.device_compiler import compiled_by

if not (Path(triton.__file__).parent / "backends/nvidia/bin/ptxas").exists():
    pytest.skip("this triton has no assembler for CUDA", allow_module_level=True)


@cache
def launches() -> dict[str, list[dict[str, Any]]]:
    """What the compiler says of each kernel of each case, in a process that does not interpret."""
    return compiled_by("fused_compiler.py")


def test_every_kernel_compiles_and_keeps_its_numbers_in_registers() -> None:
    kernels = {name.rpartition(": ")[2] for name in launches()}
    assert kernels == {"normalize_rows", "multiply_by_gate", "rotate_heads"}
    for name, facts in launches().items():
        for made in facts:
            assert made["spilled_bytes"] == 0, name
            assert made["shared_bytes"] <= 1024, name


@pytest.mark.parametrize(
    ("case", "at_least"),
    [
        ("norm of 4096 bfloat16", 16),
        ("norm of 128 bfloat16", 16),
        ("norm of heads bfloat16", 16),
        ("gate False bfloat16", 16),
        ("rotary 128 RotaryForm(takes_neighbours=False, gives_neighbours=False", 8),
    ],
)
def test_half_precision_moves_many_bytes_at_a_time(case: str, at_least: int) -> None:
    found = [facts for name, facts in launches().items() if name.startswith(case)]
    assert found and all(made["widest_bytes"] >= at_least for facts in found for made in facts)
