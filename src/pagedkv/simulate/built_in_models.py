"""Sizes of well-known models, as the fields of their `config.json` that matter here.

Each is written down after the published config of the repository named beside it, so that one
set of formulas serves these models and any other (`model_geometry`).
"""

from __future__ import annotations

from typing import Any


def _sizes(
    model_type: str,
    num_hidden_layers: int,
    hidden_size: int,
    intermediate_size: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    vocab_size: int,
    max_position_embeddings: int,
) -> dict[str, Any]:
    """The eight fields that nearly every config has, and bfloat16."""
    return {
        "model_type": model_type,
        "num_hidden_layers": num_hidden_layers,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position_embeddings,
        "torch_dtype": "bfloat16",
    }


def _opt(num_hidden_layers: int, hidden_size: int, num_attention_heads: int) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "num_hidden_layers": num_hidden_layers,
        "hidden_size": hidden_size,
        "ffn_dim": 4 * hidden_size,
        "num_attention_heads": num_attention_heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "torch_dtype": "float16",
    }


def _experts(count: int, chosen: int, width: int, **more: Any) -> dict[str, Any]:
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        **more,
    }


_FP16 = {"torch_dtype": "float16"}
_TIED = {"tie_word_embeddings": True}
_FP8 = {"quantization_config": {"quant_method": "fp8"}}
_MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
_LATENT = {  # multi-head latent attention, the same sizes in all of the DeepSeek line
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_ALTERNATING = ["sliding_attention", "full_attention"]

BUILT_IN_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt-6.7b": (
        "facebook/opt-6.7b",
        _opt(32, 4096, 32),
    ),
    "opt-13b": (
        "facebook/opt-13b",
        _opt(40, 5120, 40),
    ),
    "opt-66b": (
        "facebook/opt-66b",
        _opt(64, 9216, 72),
    ),
    "opt-175b": (
        "Zhang et al., OPT, arXiv 2205.01068, table 1",
        _opt(96, 12288, 96),
    ),
    "llama-13b": (
        "huggyllama/llama-13b",
        _sizes("llama", 40, 5120, 13824, 40, 40, 32000, 2048) | _FP16,
    ),
    "llama-2-7b": (
        "meta-llama/Llama-2-7b-hf",
        _sizes("llama", 32, 4096, 11008, 32, 32, 32000, 4096) | _FP16,
    ),
    "llama-2-13b": (
        "meta-llama/Llama-2-13b-hf",
        _sizes("llama", 40, 5120, 13824, 40, 40, 32000, 4096) | _FP16,
    ),
    "llama-2-70b": (
        "meta-llama/Llama-2-70b-hf",
        _sizes("llama", 80, 8192, 28672, 64, 8, 32000, 4096) | _FP16,
    ),
    "llama-3-8b": (
        "meta-llama/Meta-Llama-3-8B",
        _sizes("llama", 32, 4096, 14336, 32, 8, 128256, 8192),
    ),
    "llama-3-70b": (
        "meta-llama/Meta-Llama-3-70B",
        _sizes("llama", 80, 8192, 28672, 64, 8, 128256, 8192),
    ),
    "llama-3.1-8b": (
        "meta-llama/Llama-3.1-8B",
        _sizes("llama", 32, 4096, 14336, 32, 8, 128256, 131072),
    ),
    "llama-3.1-70b": (
        "meta-llama/Llama-3.1-70B",
        _sizes("llama", 80, 8192, 28672, 64, 8, 128256, 131072),
    ),
    "llama-3.1-405b": (
        "meta-llama/Llama-3.1-405B",
        _sizes("llama", 126, 16384, 53248, 128, 8, 128256, 131072),
    ),
    "llama-3.2-1b": (
        "meta-llama/Llama-3.2-1B",
        _sizes("llama", 16, 2048, 8192, 32, 8, 128256, 131072) | {"head_dim": 64} | _TIED,
    ),
    "llama-3.2-3b": (
        "meta-llama/Llama-3.2-3B",
        _sizes("llama", 28, 3072, 8192, 24, 8, 128256, 131072) | {"head_dim": 128} | _TIED,
    ),
    "llama-3.3-70b": (
        "meta-llama/Llama-3.3-70B-Instruct",
        _sizes("llama", 80, 8192, 28672, 64, 8, 128256, 131072),
    ),
    "mistral-7b": (
        "mistralai/Mistral-7B-v0.3",
        _sizes("mistral", 32, 4096, 14336, 32, 8, 32768, 32768) | {"sliding_window": None},
    ),
    "mistral-small-24b": (
        "mistralai/Mistral-Small-24B-Instruct-2501",
        _sizes("mistral", 40, 5120, 32768, 32, 8, 131072, 32768) | {"head_dim": 128},
    ),
    "mixtral-8x7b": (
        "mistralai/Mixtral-8x7B-v0.1",
        _sizes("mixtral", 32, 4096, 14336, 32, 8, 32000, 32768)
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen2.5-7b": (
        "Qwen/Qwen2.5-7B-Instruct",
        _sizes("qwen2", 28, 3584, 18944, 28, 4, 152064, 32768),
    ),
    "qwen2.5-32b": (
        "Qwen/Qwen2.5-32B-Instruct",
        _sizes("qwen2", 64, 5120, 27648, 40, 8, 152064, 32768),
    ),
    "qwen2.5-72b": (
        "Qwen/Qwen2.5-72B-Instruct",
        _sizes("qwen2", 80, 8192, 29568, 64, 8, 152064, 32768),
    ),
    "qwen3-0.6b": (
        "Qwen/Qwen3-0.6B",
        _sizes("qwen3", 28, 1024, 3072, 16, 8, 151936, 40960) | {"head_dim": 128} | _TIED,
    ),
    "qwen3-8b": (
        "Qwen/Qwen3-8B",
        _sizes("qwen3", 36, 4096, 12288, 32, 8, 151936, 40960) | {"head_dim": 128},
    ),
    "qwen3-32b": (
        "Qwen/Qwen3-32B",
        _sizes("qwen3", 64, 5120, 25600, 64, 8, 151936, 40960) | {"head_dim": 128},
    ),
    "qwen3-30b-a3b": (
        "Qwen/Qwen3-30B-A3B",
        _sizes("qwen3_moe", 48, 2048, 6144, 32, 4, 151936, 40960)
        | {"head_dim": 128}
        | _experts(128, 8, 768),
    ),
    "qwen3-235b-a22b": (
        "Qwen/Qwen3-235B-A22B",
        _sizes("qwen3_moe", 94, 4096, 12288, 64, 4, 151936, 40960)
        | {"head_dim": 128}
        | _experts(128, 8, 1536),
    ),
    "qwen3-next-80b-a3b": (
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        _sizes("qwen3_next", 48, 2048, 5120, 16, 2, 151936, 262144)
        | {"head_dim": 256, "full_attention_interval": 4}
        | _experts(512, 10, 512, shared_expert_intermediate_size=512),
    ),
    "gemma-2-9b": (
        "google/gemma-2-9b",
        _sizes("gemma2", 42, 3584, 14336, 16, 8, 256000, 8192)
        | {"head_dim": 256, "sliding_window": 4096},
    ),
    "gemma-3-4b": (
        "google/gemma-3-4b-it",
        _sizes("gemma3_text", 34, 2560, 10240, 8, 4, 262208, 131072)
        | {"head_dim": 256, "sliding_window": 1024},
    ),
    "gemma-3-27b": (
        "google/gemma-3-27b-it",
        _sizes("gemma3_text", 62, 5376, 21504, 32, 16, 262208, 131072)
        | {"head_dim": 128, "sliding_window": 1024},
    ),
    "deepseek-v2-lite": (
        "deepseek-ai/DeepSeek-V2-Lite",
        _sizes("deepseek_v2", 27, 2048, 10944, 16, 16, 102400, 163840)
        | _experts(64, 6, 1408, n_shared_experts=2, first_k_dense_replace=1)
        | _LATENT,
    ),
    "deepseek-v3": (
        "deepseek-ai/DeepSeek-V3",
        _sizes("deepseek_v3", 61, 7168, 18432, 128, 128, 129280, 163840)
        | {"q_lora_rank": 1536}
        | _experts(256, 8, 2048, n_shared_experts=1, first_k_dense_replace=3)
        | _LATENT
        | _FP8,
    ),
    "kimi-k2": (
        "moonshotai/Kimi-K2-Instruct",
        _sizes("kimi_k2", 61, 7168, 18432, 64, 64, 163840, 131072)
        | {"q_lora_rank": 1536}
        | _experts(384, 8, 2048, n_shared_experts=1, first_k_dense_replace=1)
        | _LATENT
        | _FP8,
    ),
    "glm-4.5-air": (
        "zai-org/GLM-4.5-Air",
        _sizes("glm4_moe", 46, 4096, 10944, 96, 8, 151552, 131072)
        | {"head_dim": 128}
        | _experts(128, 8, 1408, n_shared_experts=1, first_k_dense_replace=1),
    ),
    "gpt-oss-20b": (
        "openai/gpt-oss-20b",
        _sizes("gpt_oss", 24, 2880, 2880, 64, 8, 201088, 131072)
        | {
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "layer_types": 12 * _ALTERNATING,
        }
        | _MXFP4,
    ),
    "gpt-oss-120b": (
        "openai/gpt-oss-120b",
        _sizes("gpt_oss", 36, 2880, 2880, 64, 8, 201088, 131072)
        | {
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "layer_types": 18 * _ALTERNATING,
        }
        | _MXFP4,
    ),
    "smollm2-135m": (
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        _sizes("llama", 30, 576, 1536, 9, 3, 49152, 8192) | _TIED,
    ),
    "smollm2-1.7b": (
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        _sizes("llama", 24, 2048, 8192, 32, 32, 49152, 8192) | _TIED,
    ),
    "phi-3-mini": (
        "microsoft/Phi-3-mini-4k-instruct",
        _sizes("phi3", 32, 3072, 8192, 32, 32, 32064, 4096) | {"sliding_window": 2047},
    ),
    "phi-4": (
        "microsoft/phi-4",
        _sizes("phi3", 40, 5120, 17920, 40, 10, 100352, 16384),
    ),
    "falcon-7b": (
        "tiiuae/falcon-7b",
        {
            "model_type": "falcon",
            "num_hidden_layers": 32,
            "hidden_size": 4544,
            "num_attention_heads": 71,
            "multi_query": True,
            "new_decoder_architecture": False,
            "vocab_size": 65024,
            "torch_dtype": "bfloat16",
        },
    ),
    "falcon-40b": (
        "tiiuae/falcon-40b",
        {
            "model_type": "falcon",
            "num_hidden_layers": 60,
            "hidden_size": 8192,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "new_decoder_architecture": True,
            "vocab_size": 65024,
            "torch_dtype": "bfloat16",
        },
    ),
}
"""Name -> the repository (or paper) whose config it follows, and the fields of that config."""
