"""One script for a GPU machine: is everything right there, and how near is it to what it can do?

Needs torch, triton, numba and transformers, nothing of the network. Checks every kernel against
the float64 reference on the device, then measures, prints a table and writes JSON with the
device's name, a file for each half. At most eight minutes, in two halves of less than four: the
kernels (`gpu_kernels.py`) and the engine (`gpu_engine.py`). A half that fails is told of and does
not keep the other from running.

    python benchmarks/gpu.py [--only kernels,engine] [--out DIR] [--tune]
    python benchmarks/gpu.py --smoke    # toy sizes on any CPU: tries the script itself
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
HALVES = {"kernels": "gpu_kernels", "engine": "gpu_engine"}
"""Each a module beside this with `measure(settings) -> dict` for the JSON, which prints as it
goes and looks at `settings.seconds_left()` before it begins what takes long."""
SECONDS_EACH = 215.0


@dataclass(frozen=True)
class Settings:
    """What a half is to do."""

    device: str
    """"cuda", or "cpu" in Triton's interpreter."""
    smoke: bool
    """Toy sizes: only that it runs matters."""
    tune: bool
    """Also try other sizes of tiles than those chosen."""
    ends_at: float

    def seconds_left(self) -> float:
        return self.ends_at - time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=",".join(HALVES), help="kernels, engine, or both")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON")
    parser.add_argument("--smoke", action="store_true", help="toy sizes, on the CPU if need be")
    parser.add_argument("--tune", action="store_true", help="other tiles too; takes minutes more")
    arguments = parser.parse_args()
    for path in (ROOT / "src", ROOT / "benchmarks"):
        sys.path.insert(0, str(path))
    if arguments.smoke and not Path("/dev/nvidiactl").exists():
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

    import torch

    has_device = torch.cuda.is_available()
    if not has_device and not arguments.smoke:
        parser.exit(2, "gpu.py: torch sees no CUDA device here: use --smoke to try the script\n")
    facts = about(torch)
    print(" ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    failed = False
    for name in arguments.only.split(","):
        if name not in HALVES:
            parser.error(f"--only names {name!r}: choose from {', '.join(HALVES)}")
        if importlib.util.find_spec(HALVES[name]) is None:
            print(f"{name}: benchmarks/{HALVES[name]}.py is not in this checkout")
            continue
        settings = Settings(
            device="cuda" if has_device else "cpu",
            smoke=arguments.smoke,
            tune=arguments.tune,
            ends_at=time.monotonic() + SECONDS_EACH,
        )
        began = time.monotonic()
        try:
            result: dict[str, Any] = importlib.import_module(HALVES[name]).measure(settings)
        except Exception as problem:
            traceback.print_exc()
            result = {"failed": repr(problem)}
        failed |= bool(result.get("failed"))
        result["seconds"] = round(time.monotonic() - began, 1)
        write({"about": facts, name: result}, name, arguments.out)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if failed else 0)  # a peer's thread that does not stop would be waited for


def about(torch: Any) -> dict[str, str]:
    """The device and the versions, which every figure depends on."""
    import numpy as np
    import triton

    import pagedkv

    facts = {
        "device": "interpreter",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": np.__version__,
        "pagedkv": pagedkv.__version__,
        "commit": commit(),
    }
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        facts["device"] = found.name
        facts["memory_gb"] = f"{found.total_memory / 1e9:.0f}"
        facts["processors"] = str(found.multi_processor_count)
        facts["cuda"] = str(torch.version.cuda)
    return facts


def commit() -> str:
    """Of this checkout, with a + where it has been changed; unknown in a copy without git."""
    try:
        done = [
            subprocess.run(
                ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
            ).stdout.strip()
            for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "-uno"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done[0] + ("+" if done[1] else "")


def write(result: dict[str, Any], half: str, folder: Path) -> None:
    """What a half found, in a file of its own, so that another run of the other leaves it be."""
    device = re.sub(r"[^a-z0-9]+", "-", result["about"]["device"].lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu-{device}-{half}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"written: {path}", flush=True)


if __name__ == "__main__":
    main()
