"""GPUs by name: memory, arithmetic and memory bandwidth, each after its maker's publication.

Arithmetic is the dense 16-bit rate of the matrix units with 32-bit accumulation, which is what
language models run on; makers often print twice as much, for matrices with half of their values
zero. Memory is counted in GiB, which is what the devices report under the makers' GB, give or
take what they keep for themselves.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from pagedkv.errors import InvalidInput

_GIB = 1 << 30


@dataclass(frozen=True)
class GPU:
    """One GPU: `memory_bytes`, dense fp16/bf16 `flops_per_s`, memory `bandwidth_bytes_per_s`.

    `source` names the publication that all three figures are from.
    """

    name: str
    memory_bytes: int
    flops_per_s: float
    bandwidth_bytes_per_s: float
    source: str


def gpu_by_name(name: str) -> GPU:
    """The GPU that `name` means, whatever its case, spaces, dashes and maker's prefix.

    Raises `InvalidInput`, one line with the closest names, where it means none.

    >>> gpu_by_name("nvidia a100 80gb").name
    'A100-80GB'
    >>> gpu_by_name("rtx4090").memory_bytes // 2**30
    24
    """
    wanted = _normalised(name)
    wanted = _ALIASES.get(wanted, wanted)
    by_name = {_normalised(gpu.name): gpu for gpu in GPUS}
    if wanted in by_name:
        return by_name[wanted]
    close = difflib.get_close_matches(wanted, by_name, n=3, cutoff=0.5)
    if close:
        advice = f"did you mean {', '.join(by_name[match].name for match in close)}?"
    else:
        advice = f"choose from {', '.join(gpu.name for gpu in GPUS)}"
    raise InvalidInput(f"unknown GPU {name!r}: {advice}")


def _normalised(name: str) -> str:
    words = re.sub(r"nvidia|geforce|tesla|amd|instinct", "", name.lower())
    words = re.sub(r"sxm\d*|hbm\d*e?", "", words)  # the form that the bare names stand for
    return re.sub(r"[^a-z0-9]", "", words)


def _gpu(
    name: str, *, memory_gib: int, tflops: float, bandwidth_gb_per_s: float, source: str
) -> GPU:
    return GPU(name, memory_gib * _GIB, tflops * 1e12, bandwidth_gb_per_s * 1e9, source)


_A100 = "NVIDIA A100 Tensor Core GPU datasheet"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet (half of the rate with sparsity)"
_AMPERE_RTX = "NVIDIA Ampere GA102 GPU architecture whitepaper"

GPUS: tuple[GPU, ...] = (
    _gpu("A100-40GB", memory_gib=40, tflops=312, bandwidth_gb_per_s=1555, source=_A100),
    _gpu("A100-80GB", memory_gib=80, tflops=312, bandwidth_gb_per_s=2039, source=_A100 + ", SXM"),
    _gpu("H100", memory_gib=80, tflops=989.5, bandwidth_gb_per_s=3350, source=_H100 + ", SXM"),
    _gpu("H100-PCIe", memory_gib=80, tflops=756.5, bandwidth_gb_per_s=2000, source=_H100),
    _gpu("H100-NVL", memory_gib=94, tflops=835.5, bandwidth_gb_per_s=3900, source=_H100),
    _gpu(
        "H200",
        memory_gib=141,
        tflops=989.5,
        bandwidth_gb_per_s=4800,
        source="NVIDIA H200 Tensor Core GPU datasheet, SXM (half of the rate with sparsity)",
    ),
    _gpu(
        "B200",
        memory_gib=180,
        tflops=2250,
        bandwidth_gb_per_s=8000,
        source="NVIDIA HGX B200 and DGX B200 datasheets, an eighth (half of the sparse rate)",
    ),
    _gpu(
        "L4",
        memory_gib=24,
        tflops=121,
        bandwidth_gb_per_s=300,
        source="NVIDIA L4 Tensor Core GPU datasheet (half of the rate with sparsity)",
    ),
    _gpu(
        "L40S",
        memory_gib=48,
        tflops=362,
        bandwidth_gb_per_s=864,
        source="NVIDIA L40S datasheet",
    ),
    _gpu(
        "L40",
        memory_gib=48,
        tflops=181,
        bandwidth_gb_per_s=864,
        source="NVIDIA L40 datasheet",
    ),
    _gpu(
        "A10",
        memory_gib=24,
        tflops=125,
        bandwidth_gb_per_s=600,
        source="NVIDIA A10 Tensor Core GPU datasheet",
    ),
    _gpu(
        "A30",
        memory_gib=24,
        tflops=165,
        bandwidth_gb_per_s=933,
        source="NVIDIA A30 Tensor Core GPU datasheet",
    ),
    _gpu(
        "A40",
        memory_gib=48,
        tflops=149.7,
        bandwidth_gb_per_s=696,
        source="NVIDIA A40 datasheet",
    ),
    _gpu(
        "T4",
        memory_gib=16,
        tflops=65,
        bandwidth_gb_per_s=320,
        source="NVIDIA T4 datasheet (fp16 only)",
    ),
    _gpu(
        "V100-32GB",
        memory_gib=32,
        tflops=125,
        bandwidth_gb_per_s=900,
        source="NVIDIA V100 Tensor Core GPU datasheet, SXM2 (fp16 only)",
    ),
    _gpu("RTX A6000", memory_gib=48, tflops=154.8, bandwidth_gb_per_s=768, source=_AMPERE_RTX),
    _gpu("RTX 3090", memory_gib=24, tflops=71, bandwidth_gb_per_s=936, source=_AMPERE_RTX),
    _gpu(
        "RTX 4090",
        memory_gib=24,
        tflops=165.2,
        bandwidth_gb_per_s=1008,
        source="NVIDIA Ada GPU architecture whitepaper",
    ),
    _gpu(
        "RTX 5090",
        memory_gib=32,
        tflops=209.5,
        bandwidth_gb_per_s=1792,
        source="NVIDIA RTX Blackwell GPU architecture whitepaper",
    ),
    _gpu(
        "MI300X",
        memory_gib=192,
        tflops=1307.4,
        bandwidth_gb_per_s=5300,
        source="AMD Instinct MI300X accelerator data sheet",
    ),
    _gpu(
        "MI325X",
        memory_gib=256,
        tflops=1307.4,
        bandwidth_gb_per_s=6000,
        source="AMD Instinct MI325X accelerator data sheet",
    ),
)
"""All GPUs that are known by name."""

_ALIASES = {
    "a100": "a10080gb",
    "v100": "v10032gb",
    "h10080gb": "h100",
    "h200141gb": "h200",
    "b200180gb": "b200",
    "3090": "rtx3090",
    "4090": "rtx4090",
    "5090": "rtx5090",
    "a6000": "rtxa6000",
}
