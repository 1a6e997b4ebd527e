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
from pathlib import Path
from typing import Any

TARGET = ("cuda", 90, 32)
"""An H100 or H200."""


def compiled(kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """What the compiler says of one launch, with the types and alignments of its arguments."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
             torch.int32: "i32", torch.int64: "i64"}  # fmt: skip
    constants = {name: value for name, value in named.items() if name in names}
    signature = dict.fromkeys(constants, "constexpr")
    aligned = {}
    for place, (name, given) in enumerate(zip(names, arguments)):
        if isinstance(given, torch.Tensor):
            signature[name] = "*" + types[given.dtype]
            is_aligned = given.data_ptr() % 16 == 0
        elif isinstance(given, int):
            signature[name] = "i32" if abs(given) < 2**31 else "i64"
            is_aligned = given % 16 == 0
        else:
            signature[name] = "fp32"
            is_aligned = False
        if is_aligned:
            aligned[(place,)] = [["tt.divisibility", 16]]
    made = triton.compile(
        ASTSource(kernel, {name: signature[name] for name in names}, constants, aligned),
        target=GPUTarget(*TARGET),
        options={name: value for name, value in named.items() if name not in names},
    )
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
        "warps": named.get("num_warps", 4),
    }  # fmt: skip


class Recorder:
    """Stands where a kernel does, and compiles what it would have launched."""

    def __init__(self, kernel: Any, keep: Callable[[str, dict[str, Any]], None]) -> None:
        self.kernel, self.keep = kernel, keep

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            self.keep(self.kernel.__name__, compiled(self.kernel, arguments, named))

        return launch


def main(cases: dict[str, dict[str, Any]]) -> None:
    import numpy as np
    import torch
    from triton import knobs

    from pagedkv.attention import LayerShape
    from pagedkv.attention.gpu import storage as module

    knobs.runtime.interpret = True  # the kernels are defined; now a storage may lie on the host
    found: dict[str, list[dict[str, Any]]] = {}
    kernels = ("attend_pieces", "combine_parts", "write_rows", "copy_pages")
    originals = {name: getattr(module, name) for name in kernels}
    for case, given in cases.items():
        for name in kernels:
            keep = lambda kernel, facts, case=case: found.setdefault(  # noqa: E731
                f"{case}: {kernel}", []
            ).append(facts)
            setattr(module, name, Recorder(originals[name], keep))
        shape = LayerShape(8, given["dim"], given["dim"])
        storage = module.GPUStorage(
            600, given.get("block_size", 16), [shape] * 2, dtype=given["dtype"], device="cpu"
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
