"""Compiles, without a device, every kernel that the fused layers launch; see `device_compiler`."""

from __future__ import annotations

import json
import os
from typing import Any


def main() -> None:
    import torch
    from triton.runtime.driver import driver

    from models.device_compiler import NoDevice, Recorder
    from pagedkv.engine.fused import gates, norms, rotary

    driver.set_active(NoDevice())  # type: ignore[arg-type]
    found: dict[str, list[dict[str, Any]]] = {}
    case = ""

    def keep(kernel: str, facts: dict[str, Any]) -> None:
        found.setdefault(f"{case}: {kernel}", []).append(facts)

    norms.normalize_rows = Recorder(norms.normalize_rows, keep)
    gates.multiply_by_gate = Recorder(gates.multiply_by_gate, keep)
    rotary.rotate_heads = Recorder(rotary.rotate_heads, keep)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for size in (128, 1024, 1536, 4096, 8192, 1 << 15):
            x = torch.zeros(4, size, dtype=dtype)
            for form in (*norms.FORMS, norms.UNWEIGHTED):
                case = f"norm of {size} {name} {form}"
                norms.normalized(x, x[0], 1e-6, form)
        qkv = torch.zeros(1, 4, 32 + 8 + 8, 128, dtype=dtype)
        case = f"norm of heads {name}"
        norms.normalized(qkv[:, :, :32], qkv[0, 0, 0], 1e-6, norms.FORMS[0])
        for is_gelu in (False, True):
            case = f"gate {is_gelu} {name}"
            gates.gated(torch.zeros(4, 2 * 12288, dtype=dtype), is_gelu)
        for form in rotary.FORMS:
            for width in (128, 64):
                case = f"rotary {width} {form} {name}"
                cos = torch.zeros(1, 4, width // 2 if form.whole else width, dtype=dtype)
                q, k = (part.transpose(1, 2) for part in qkv.split([32, 16], 2))
                rotary.rotated(q, k, cos, cos, form)
        case = f"rotary of one {name}"
        rotary.rotated(q, None, cos, cos, form)
    print(json.dumps(found))


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"
    main()
