"""PyTorch's part of `bench_attention.py`: run in the peers' environment, never by the product.

A prompt of 2,048 tokens in chunks of 512, each with the mask that a chunk needs; in milliseconds.
"""

import time

import torch
import torch.nn.functional as F

LENGTH, CHUNK = 2048, 512
for dtype in (torch.float32, torch.bfloat16):
    for kv_heads, each, dim in ((8, 4, 128), (8, 1, 128), (3, 3, 64)):
        q = torch.randn(1, kv_heads * each, LENGTH, dim, dtype=dtype)
        k, v = torch.randn(2, 1, kv_heads, LENGTH, dim, dtype=dtype)
        starts = range(0, LENGTH, CHUNK)
        tokens = torch.arange(LENGTH)
        masks = [tokens[: s + CHUNK] <= tokens[s : s + CHUNK, None] for s in starts]
        times = []
        for _ in range(6):
            begin = time.perf_counter()
            for start, mask in zip(starts, masks):
                stop = start + CHUNK
                F.scaled_dot_product_attention(
                    q[:, :, start:stop],
                    k[:, :, :stop],
                    v[:, :, :stop],
                    attn_mask=mask,
                    enable_gqa=each > 1,
                )
            times.append(time.perf_counter() - begin)
        name = str(dtype).rpartition(".")[2]
        print(f"{name} {kv_heads} {each} {dim} ms {min(times[1:]) * 1e3:.1f}", flush=True)
