"""Compiles, without a device, every kernel that a storage launches, for a device that is not here.

Run as a program: Triton decides when a kernel is defined whether it will be interpreted, and the
tests' own process interprets. Prints one JSON object, by kernel and what was asked of it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any


def compiled_by(program: str, *arguments: str) -> dict[str, list[dict[str, Any]]]:
    """What the compiler says of each kernel of each case of a program in this folder, which runs
    in a process that does not interpret."""
    tests = Path(__file__).parents[1]
    path = [str(tests.parent / "src"), str(tests), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(tests / "models" / program), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


class NoDevice:
    """Stands where Triton looks for a device: says which one to compile for, and runs nothing."""

    capability = 90
    """An H100 or H200."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def facts_of(made: Any, num_warps: int) -> dict[str, Any]:
    """What the compiler says of a compiled kernel."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run(
            [tool, "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    ptx = made.asm["ptx"]
    registers, spilled = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())  # type: ignore[union-attr]
    return {
        "registers": registers,
        "spilled_bytes": spilled,
        "shared_bytes": made.metadata.shared,
        "copies_of_16_bytes": len(re.findall(r"cp\.async\.cg\.shared\.global.*0x10", ptx)),
        "matrix_products": len(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync", ptx)),
        "widest_bytes": max(
            int(vector or 1) * int(bits) // 8
            for vector, bits in re.findall(r"\bld\.global(?:\.v(\d))?\.b(\d+)", ptx)
        ),
        "warps": num_warps,
    }  # fmt: skip


class Recorder:
    """Stands where a kernel does, and compiles what it would have launched."""

    def __init__(self, kernel: Any, keep: Callable[[str, dict[str, Any]], None]) -> None:
        self.kernel, self.keep = kernel, keep

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            made = self.kernel.warmup(*arguments, grid=grid, **named)
            self.keep(self.kernel.__name__, facts_of(made, named["num_warps"]))

        return launch


def main(cases: dict[str, dict[str, Any]]) -> None:
    import numpy as np
    import torch
    from triton import knobs
    from triton.runtime.driver import driver

    from pagedkv.attention import LayerShape
    from pagedkv.attention.gpu import storage as module

    device = NoDevice()
    driver.set_active(device)  # type: ignore[arg-type]
    knobs.runtime.interpret = True  # the kernels are defined; now a storage may lie on the host
    found: dict[str, list[dict[str, Any]]] = {}
    kernels = ("attend_pieces", "combine_parts", "write_rows", "copy_pages")
    originals = {name: getattr(module, name) for name in kernels}
    for case, given in cases.items():
        device.capability = given.get("capability", 90)
        for name in kernels:
            keep = lambda kernel, facts, case=case: found.setdefault(  # noqa: E731
                f"{case}: {kernel}", []
            ).append(facts)
            setattr(module, name, Recorder(originals[name], keep))
        shape = LayerShape(8, given["dim"], given["dim"])
        storage = module.GPUStorage(
            600, given.get("block_size", 16), [shape] * 2, dtype=given["dtype"], device="cpu"
        )
        # So many processors that contexts are cut.
        storage._machine = replace(
            storage._machine, num_processors=132, shared_bytes=given.get("shared_kib", 227) * 1024
        )
        dtype = module.DTYPES[given["dtype"]]
        rows = torch.zeros(2, 8, given["dim"], dtype=dtype)
        if given.get("writes"):
            storage.write(1, rows, rows, [0, 1])
            storage.copy_blocks([[0, 1]])
        num_queries = given["queries"]
        q = torch.zeros(num_queries, 32, given["dim"], dtype=dtype)
        tables = np.zeros((1, 600), dtype=np.int32)
        storage.attend(1, q, tables, [4000], [0, num_queries], **given.get("options", {}))
    print(json.dumps(found))


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"
    main(json.loads(sys.argv[1]))
