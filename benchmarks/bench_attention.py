"""Attention on CPUs: decoding and prefill, beside vLLM's C++ kernel and PyTorch, in one run.

GB/s are bytes of K and V read a second, so that they can be held against what the machine can
read at all. Ours and the peers' runs take turns; set `PAGEDKV_PEERS` as `peers.py` says.

    python benchmarks/bench_attention.py [--only decode,prefill] [--turns 3]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
from peers import SHARED

from pagedkv.attention import KVStorage, LayerShape

# (dtype, sequences, KV heads, query heads each, head size); every sequence has 2,048 tokens.
SHAPES = [
    (dtype, *shape)
    for dtype in ("float32", "bfloat16")
    for shape in ((32, 8, 4, 128), (32, 8, 1, 128), (64, 3, 3, 64))
]
LENGTH = 2048


def gb_per_s(
    dtype: str, sequences: int, kv_heads: int, each: int, dim: int, block_size: int
) -> float:
    """One token more for each sequence; the best of 7."""
    num_blocks = sequences * LENGTH // block_size
    storage = KVStorage(num_blocks, block_size, [LayerShape(kv_heads, dim, dim)], dtype=dtype)
    rng = np.random.default_rng(0)
    some = rng.standard_normal((block_size, kv_heads, dim), dtype=np.float32)
    storage.write(0, some, some, np.arange(block_size))
    storage.data[1:] = storage.data[0]
    tables = rng.permutation(num_blocks).reshape(sequences, -1).astype(np.int32)
    q = rng.standard_normal((sequences, kv_heads * each, dim), dtype=np.float32)
    lengths, starts = np.full(sequences, LENGTH), np.arange(sequences + 1)
    out = np.empty_like(q)
    seconds = best_of(7, lambda: storage.attend(0, q, tables, lengths, starts, out=out))
    return storage.nbytes / seconds / 1e9


def prefill_ms(dtype: str, kv_heads: int, each: int, dim: int) -> float:
    """A prompt of 2,048 tokens in chunks of 512, written and attended to; the best of 5."""
    storage = KVStorage(LENGTH // 16, 16, [LayerShape(kv_heads, dim, dim)], dtype=dtype)
    rng = np.random.default_rng(0)
    k = torch.randn((LENGTH, kv_heads, dim), dtype=getattr(torch, dtype))
    q = torch.randn((LENGTH, kv_heads * each, dim), dtype=getattr(torch, dtype))
    table = rng.permutation(LENGTH // 16).astype(np.int32)
    tokens = np.arange(LENGTH)
    slots = table[tokens // 16].astype(np.int64) * 16 + tokens % 16

    def prompt() -> None:
        for start in range(0, LENGTH, 512):
            chunk = slice(start, start + 512)
            storage.write(0, k[chunk], k[chunk], slots[chunk])
            storage.attend(0, q[chunk], table[None], [start + 512], [0, 512])

    return best_of(5, prompt) * 1e3


def best_of(runs: int, work: Callable[[], object]) -> float:
    """Seconds of the quickest run, after one that loads compiled code."""
    work()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def printed_by(command: list[str | Path], **options: str) -> str:
    """What a peer prints; also of one that ends in a crash, as vLLM's bfloat16 kernel may."""
    done = subprocess.run(command, text=True, capture_output=True, check=False, **options)
    return done.stdout


def read_limit() -> float:
    """GB/s that this machine can read; nan without a C compiler or the peers' sources."""
    source = SHARED / "peers" / "read_bandwidth.c"
    if not (shutil.which("gcc") and source.exists()):
        return float("nan")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "read"
        flags = ["-O3", "-march=native", "-fopenmp"]
        subprocess.run(["gcc", *flags, source, "-o", program], check=True)
        return max(float(figure) for figure in re.findall(r"(\S+) GB/s", printed_by([program])))


def peers_figures() -> list[dict[str, float]]:
    """For each shape: vLLM's best block size, SDPA on contiguous tensors, gather then SDPA."""
    found: list[dict[str, float]] = [{} for _ in SHAPES]
    if "PAGEDKV_PEERS" not in os.environ:
        return found
    python = Path(os.environ["PAGEDKV_PEERS"]) / "bin" / "python"
    vllm = printed_by([python, "peers/vllm_attention.py"], cwd=str(SHARED))
    torch = printed_by([python, "peers/torch_sdpa.py"], cwd=str(SHARED))
    for figures, (dtype, *shape) in zip(found, SHAPES):
        dims = ", ".join(map(str, shape))
        rates = re.findall(rf"{dtype} \S+ \({dims}, {LENGTH}, \d+\) GB/s (\S+)", vllm)
        figures["vLLM"] = max(map(float, rates), default=float("nan"))
        dims = " ".join(map(str, shape))
        pattern = rf"{dtype} {dims} {LENGTH} SDPA contiguous GB/s (\S+).*\n.*SDPA GB/s (\S+)"
        if match := re.search(pattern, torch):
            figures["SDPA"], figures["gather"] = float(match[1]), float(match[2])
    return found


def sdpa_prefill() -> str:
    """What `peer_prefill.py` prints, in the peers' environment; empty without one."""
    if "PAGEDKV_PEERS" not in os.environ:
        return ""
    python = Path(os.environ["PAGEDKV_PEERS"]) / "bin" / "python"
    return printed_by([python, Path(__file__).with_name("peer_prefill.py")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="decode,prefill")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    if "decode" in arguments.only:
        compare_decode(arguments.turns)
    if "prefill" in arguments.only:
        compare_prefill(arguments.turns)


def compare_decode(turns: int) -> None:
    limits: list[float] = []
    ours: list[list[float]] = [[] for _ in SHAPES]
    wide: list[list[float]] = [[] for _ in SHAPES]
    theirs: list[dict[str, list[float]]] = [{} for _ in SHAPES]
    for _ in range(turns):
        limits.append(read_limit())
        for i, shape in enumerate(SHAPES):
            ours[i].append(gb_per_s(*shape, block_size=16))
            wide[i].append(gb_per_s(*shape, block_size=256))
        for i, figures in enumerate(peers_figures()):
            for name, figure in figures.items():
                theirs[i].setdefault(name, []).append(figure)
    limit = median(limits)
    print(f"decode attention, GB/s of K and V; this machine reads {limit:.1f}")
    print("bar: 1.2 times vLLM, 1.5 times SDPA, 10 times gather; block 16 within 10 % of 256")
    for i, shape in enumerate(SHAPES):
        rate = median(ours[i])
        line = f"  {shape!s:34} {rate:5.1f}, {rate / limit:4.0%} of the limit"
        line += f", {rate / median(wide[i]):.2f} of block 256"
        for name, figures in theirs[i].items():
            line += f"; {name} {median(figures):.1f}: {rate / median(figures):.2f} times"
        print(line)


def compare_prefill(turns: int) -> None:
    print("prefill of 2,048 tokens, chunks of 512, ms; bar: no slower than SDPA, contiguous")
    spent: list[list[float]] = [[] for _ in SHAPES]
    peer: list[list[float]] = [[] for _ in SHAPES]
    for _ in range(turns):
        for i, (dtype, _, *dims) in enumerate(SHAPES):
            spent[i].append(prefill_ms(dtype, *dims))
        printed = sdpa_prefill()
        for i, (dtype, _, *dims) in enumerate(SHAPES):
            if match := re.search(rf"{dtype} {' '.join(map(str, dims))} ms (\S+)", printed):
                peer[i].append(float(match[1]))
    for i, (dtype, _, *dims) in enumerate(SHAPES):
        line = f"  {dtype} {dims!s:34} {median(spent[i]):6.1f}"
        if peer[i]:
            line += f"; SDPA {median(peer[i]):.1f}: {median(peer[i]) / median(spent[i]):.2f} times"
        print(line)


if __name__ == "__main__":
    main()
