"""One script for a GPU machine: is everything right there, and how near is it to what it can do?

Needs torch, triton, numba and transformers, nothing of the network. Checks every kernel against
the float64 reference on the device, then measures, prints a table and writes JSON with the
device's name, a file for each part: correctness and kernels (`gpu_kernels.py`), and the engine
(`gpu_engine.py`). At most eight minutes. Each part runs in a process of its own, which is ended
when its time is over: a kernel that writes where it must not leaves the device useless to the
process that launched it, and to no other. What a part has found is written as it finds it.

    python benchmarks/gpu.py [--only correctness,kernels,engine] [--out DIR] [--tune]
    python benchmarks/gpu.py --smoke    # toy sizes on any CPU: tries the script itself
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Part:
    """What runs in one process."""

    module: str
    """Beside this one."""
    function: str
    """Takes `Settings` and gives a dict for the JSON; prints as it goes, and looks at
    `seconds_left()` before it begins what takes long."""
    seconds: float
    """From the start of the process."""


PARTS = {
    "correctness": Part("gpu_kernels", "check", 95.0),
    "kernels": Part("gpu_kernels", "measure", 120.0),
    "engine": Part("gpu_engine", "measure", 215.0),
}
ENDING_S = 10.0
"""What a part may take longer than it should, before it is ended."""
TUNING_S = 240.0
NO_DEVICE = 2
"""Exit status."""


@dataclass(frozen=True)
class Settings:
    """What a part is to do."""

    device: str
    """"cuda", or "cpu" in Triton's interpreter."""
    smoke: bool
    """Toy sizes: only that it runs matters."""
    tune: bool
    """Also try other sizes of tiles than those chosen."""
    ends_at: float
    keep: Callable[[dict[str, Any]], None]
    """Writes what has been found so far."""

    def seconds_left(self) -> float:
        return self.ends_at - time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=",".join(PARTS), help="correctness, kernels, engine")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON")
    parser.add_argument("--smoke", action="store_true", help="toy sizes, on the CPU if need be")
    parser.add_argument("--tune", action="store_true", help="other tiles too; takes minutes more")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    for name in names:
        if name not in PARTS:
            parser.error(f"--only names {name!r}: choose from {', '.join(PARTS)}")
    if arguments.smoke and not Path("/dev/nvidiactl").exists():
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # whoever looks for kernels there would wait
    if arguments.in_process:
        failed = run_part(names[0], arguments)
    else:
        failed = False
        for name in names:
            failed |= not began_and_ended(name, arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(failed)  # a peer's thread that does not stop would be waited for


def seconds_of(name: str, arguments: argparse.Namespace) -> float:
    return PARTS[name].seconds + TUNING_S * (arguments.tune and name == "kernels")


def began_and_ended(name: str, arguments: argparse.Namespace) -> bool:
    """Run a part in a process of its own; whether it went well."""
    command = [sys.executable, __file__, "--in-process", "--only", name, "--out", arguments.out]
    command += ["--smoke"] * arguments.smoke + ["--tune"] * arguments.tune
    limit_s = seconds_of(name, arguments) + ENDING_S
    try:
        done = subprocess.run(command, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        print(f"{name}: ended after {limit_s:.0f} s; what it had found is written", flush=True)
        return False
    if done.returncode < 0:
        print(f"{name}: died of signal {-done.returncode}", flush=True)
    if done.returncode == NO_DEVICE:  # it has said so, and so would the others
        raise SystemExit(NO_DEVICE)
    return done.returncode == 0


def run_part(name: str, arguments: argparse.Namespace) -> bool:
    """Run a part in this process; whether it failed."""
    began = time.monotonic()
    for path in (ROOT / "src", ROOT / "benchmarks"):
        sys.path.insert(0, str(path))

    import torch

    has_device = torch.cuda.is_available()
    if not has_device and not arguments.smoke:
        print("gpu.py: torch sees no CUDA device here: use --smoke to try the script", flush=True)
        raise SystemExit(NO_DEVICE)
    facts = about(torch)
    print(" ".join(f"{key} {value}" for key, value in facts.items()), flush=True)
    kept: dict[str, Any] = {}

    def keep(found: dict[str, Any]) -> None:
        kept.update(found)
        write({"about": facts, name: {**kept, "unfinished": True}}, name, arguments.out)

    settings = Settings(
        device="cuda" if has_device else "cpu",
        smoke=arguments.smoke,
        tune=arguments.tune,
        ends_at=began + seconds_of(name, arguments),
        keep=keep,
    )
    part = PARTS[name]
    try:
        result = dict(getattr(importlib.import_module(part.module), part.function)(settings))
    except Exception as problem:
        traceback.print_exc()
        result = {**kept, "failed": repr(problem)}
    result["seconds"] = round(time.monotonic() - began, 1)
    path = write({"about": facts, name: result}, name, arguments.out)
    print(f"written: {path}", flush=True)
    return bool(result.get("failed"))


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


def write(result: dict[str, Any], part: str, folder: Path) -> Path:
    """What a part found, in a file of its own, so that another run of the others leaves it be."""
    device = re.sub(r"[^a-z0-9]+", "-", result["about"]["device"].lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu-{device}-{part}.json"
    written = path.with_suffix(".new")
    written.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    written.replace(path)  # whole, whenever the process is ended
    return path


if __name__ == "__main__":
    main()
