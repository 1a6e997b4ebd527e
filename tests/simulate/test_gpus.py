from __future__ import annotations

import pytest

from pagedkv.errors import InvalidInput
from pagedkv.simulate.gpus import GPUS, gpu_by_name

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "memory_gib", "tflops", "bandwidth_gb_per_s"),
    [
        ("A100-40GB", 40, 312, 1555),
        ("A100-80GB", 80, 312, 2039),
        ("H100", 80, 989.5, 3350),
        ("H200", 141, 989.5, 4800),
        ("B200", 180, 2250, 8000),
        ("L40S", 48, 362, 864),
        ("RTX 4090", 24, 165.2, 1008),
        ("A10", 24, 125, 600),
        ("L4", 24, 121, 300),
        ("MI300X", 192, 1307.4, 5300),
    ],
)
def test_figures_are_those_of_the_datasheet(name, memory_gib, tflops, bandwidth_gb_per_s):
    gpu = gpu_by_name(name)
    assert gpu.name == name
    assert gpu.memory_bytes == memory_gib * GIB
    assert gpu.flops_per_s == pytest.approx(tflops * 1e12)
    assert gpu.bandwidth_bytes_per_s == pytest.approx(bandwidth_gb_per_s * 1e9)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("rtx4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("a100 40gb", "A100-40GB"),
        ("A100_80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("a100", "A100-80GB"),
        ("h100-sxm5", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("H100 PCIe", "H100-PCIe"),
        ("l40s", "L40S"),
        ("Tesla T4", "T4"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_names_match_whatever_their_case_spaces_dashes_and_prefixes(written, name):
    assert gpu_by_name(written).name == name


def test_every_gpu_is_found_by_its_own_name_and_names_its_source():
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)
    for gpu in GPUS:
        assert gpu_by_name(gpu.name) is gpu
        assert "NVIDIA" in gpu.source or "AMD" in gpu.source
        # More operations than bytes, and no unit slipped by a thousand.
        assert 50 < gpu.flops_per_s / gpu.bandwidth_bytes_per_s < 500
        assert 0.3e12 <= gpu.bandwidth_bytes_per_s <= 8e12


def test_an_unknown_gpu_lists_close_names_or_all():
    with pytest.raises(InvalidInput, match=r"unknown GPU 'H1000': did you mean H100"):
        gpu_by_name("H1000")
    with pytest.raises(InvalidInput, match=r"unknown GPU 'zzz': choose from A100-40GB, "):
        gpu_by_name("zzz")
