"""Tiny models of many architectures with random weights, and what `transformers` makes of them."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 199
MAX_LENGTH = 512

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    # layers that look back a little way, and layers that look back all the way
    "sliding_window": 8,
    "attention_chunk_size": 8,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_LATENT = {  # multi-head latent attention
    "head_dim": 8,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 2,
    "topk_group": 1,
}
_SHARING = {  # the last layers read what the last own one of their kind has written
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
}
_OF_THEIR_OWN: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "gemma3n_text": {**_SHARING, "intermediate_size": 96},
    "gemma4_text": _SHARING,
    "glm4_moe_lite": _LATENT,
    "gptj": {"rotary_dim": 8},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"] * 2},
    "opt": {"ffn_dim": 96},
    "youtu": _LATENT,
    **{
        model_type: {"layer_types": _ALTERNATING, "use_sliding_window": True}
        for model_type in (
            *("cohere2", "exaone4", "gemma2", "gemma3_text", "gpt_oss", "laguna", "mimo_v2_flash"),
            *("ministral", "olmo3", "qwen2", "qwen2_moe", "qwen3", "smollm3", "vaultgemma"),
        )
    },
}


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A configuration of `model_type` with 4 layers and 512 positions."""
    make = CONFIG_MAPPING[model_type]
    known = set(make().to_dict()) | set(getattr(make, "attribute_map", {}))
    given = {name: value for name, value in _SIZES.items() if name in known}
    return make(**{**given, **_OF_THEIR_OWN.get(model_type, {}), **changes})


def tiny_model(model_type: str, **changes: Any) -> Any:
    """A model of that configuration, float32, always with the same weights.

    Parameters that begin as zeros or ones, such as biases, norms and sinks, are moved away from
    that: where they do nothing, nobody sees that they are left out.
    """
    torch.manual_seed(0)
    config = tiny_config(model_type, **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def generated(model: Any, prompt: list[int], max_new_tokens: int) -> list[int]:
    """What `transformers.generate` adds to one prompt, greedily."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_new_tokens,
        do_sample=False,
    )
    return output[0, len(prompt) :].tolist()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: each of the first 199 bytes' letters is a token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCABULARY]
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)
