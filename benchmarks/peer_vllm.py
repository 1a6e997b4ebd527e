"""vLLM's part of `bench_engine.py`: run in the peers' environment, never by the product.

    python peer_vllm.py FOLDER PROMPTS.json NEW_TOKENS

Greedy, float32, eager; token ids in, tokens a second out, the best of 3 rounds.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main() -> None:
    from vllm import LLM, SamplingParams

    folder, prompts_file, new_tokens = sys.argv[1:]
    prompts = [{"prompt_token_ids": ids} for ids in json.loads(Path(prompts_file).read_text())]
    llm = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=2048,
        max_num_seqs=64,
        disable_log_stats=True,
    )
    params = SamplingParams(temperature=0, max_tokens=int(new_tokens), ignore_eos=True)
    rates = []
    for _ in range(4):
        start = time.perf_counter()
        found = llm.generate(prompts, params, use_tqdm=False)
        tokens = sum(len(one.outputs[0].token_ids) for one in found)
        rates.append(tokens / (time.perf_counter() - start))
    print(f"tokens/s {max(rates[1:]):.1f}")


if __name__ == "__main__":
    main()
