"""The compiler's view of the kernels, for a device that need not be here.

The interpreter runs what no compiler takes, and knows nothing of registers or shared memory; both
are seen without a device, since Triton brings its own assembler.
"""

from __future__ import annotations

import json
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

SHARED_BYTES = 227 * 1024
CASES: dict[str, dict[str, Any]] = {
    "decode": {"dtype": "bfloat16", "dim": 128, "queries": 1, "writes": True},
    "few": {"dtype": "float16", "dim": 80, "queries": 12},
    "prefill": {"dtype": "bfloat16", "dim": 128, "queries": 300},
    "everything": {
        "dtype": "bfloat16", "dim": 64, "queries": 1, "block_size": 7,
        "options": {"window": 900, "chunk": 800, "soft_cap": 20.0, "sinks": [0.0] * 32},
    },
    "float32": {"dtype": "float32", "dim": 64, "queries": 1},
    "large heads": {"dtype": "bfloat16", "dim": 256, "queries": 300, "block_size": 8},
}  # fmt: skip

# Those whose programs share most, where they may share less. (Capability, KiB.)
A100, RTX_4090 = (80, 163), (89, 99)
SMALLER: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "prefill on an A100": (A100, {"dtype": "bfloat16", "dim": 256, "queries": 300}),
    "largest heads on an RTX 4090": (RTX_4090, {"dtype": "bfloat16", "dim": 1024, "queries": 300}),
    "float32 on an RTX 4090": (RTX_4090, {"dtype": "float32", "dim": 512, "queries": 8}),
}
for _name, ((_capability, _kib), _case) in SMALLER.items():
    CASES[_name] = {**_case, "capability": _capability, "shared_kib": _kib}


@cache
def launches() -> dict[str, list[dict[str, Any]]]:
    """What the compiler says of each kernel of each case, in a process that does not interpret."""
    return compiled_by("device_compiler.py", json.dumps(CASES))


def test_every_kernel_compiles_and_fits_a_processor() -> None:
    kernels = {name.partition(": ")[2] for name in launches()}
    assert kernels == {"attend_pieces", "combine_parts", "write_rows", "copy_pages"}
    for name, facts in launches().items():
        case = name.partition(": ")[0]
        for made in facts:
            assert made["shared_bytes"] <= CASES[case].get("shared_kib", 227) * 1024, name
            assert made["spilled_bytes"] == 0 or case in SMALLER, name


@pytest.mark.parametrize("case", ["decode", "few", "prefill", "everything"])
def test_half_precision_streams_16_bytes_at_a_time_into_matrix_units(case: str) -> None:
    (made,) = launches()[f"{case}: attend_pieces"]
    assert made["copies_of_16_bytes"] > 0
    assert made["matrix_products"] > 0


def test_three_programs_that_decode_fit_a_processor() -> None:
    (made,) = launches()["decode: attend_pieces"]
    assert 3 * (made["shared_bytes"] + 1024) <= SHARED_BYTES
    assert 3 * made["registers"] * 32 * made["warps"] <= 65_536
