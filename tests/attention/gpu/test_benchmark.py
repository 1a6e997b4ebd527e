from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra [engine]")
pytest.importorskip("triton", reason="needs triton")

ROOT = Path(__file__).parents[3]


def test_the_benchmark_of_the_kernels_runs_with_toy_sizes(tmp_path: Path) -> None:
    script = ROOT / "benchmarks/gpu.py"
    done = subprocess.run(
        [sys.executable, script, "--smoke", "--only", "correctness,kernels", "--out", tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    for path in tmp_path.iterdir():
        assert path.name.startswith("gpu-") and path.suffix == ".json"
        part = path.stem.rpartition("-")[2]
        result = json.loads(path.read_text(encoding="utf-8"))
        assert set(result) == {"about", part} and "unfinished" not in result[part]
        found[part] = result[part]
    assert all(case["right"] for case in found["correctness"]["correctness"])
    kernels = found["kernels"]
    assert all("gb_per_s" in case for case in kernels["decode"])
    assert all("tflops" in case for case in kernels["prefill"])
    assert kernels["device_rates"]["copy_gb_per_s"] > 0
