from __future__ import annotations

import json

import pytest

from pagedkv.errors import InvalidInput
from pagedkv.simulate.built_in_models import BUILT_IN_CONFIGS
from pagedkv.simulate.model_geometry import built_in_models, built_in_name, model_geometry

KIB = 1024

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def config(**changes):
    """LLAMA with some fields changed, and those given as None left out."""
    return {key: value for key, value in (LLAMA | changes).items() if value is not None}


def kv_bytes(**changes):
    return model_geometry(config(**changes)).kv_bytes_per_token


@pytest.mark.parametrize(
    ("name", "kib_per_token"),
    [
        ("opt-13b", 800),  # Kwon et al., PagedAttention, section 3
        ("llama-3-8b", 128),
        ("llama-3.1-70b", 320),
        ("opt-175b", 4608),
        ("falcon-7b", 8),  # one KV head
        ("deepseek-v3", 68.625),  # a latent of 512 and a rotary key of 64, 61 layers
        ("qwen3-30b-a3b", 96),
        ("gemma-3-27b", 496),
        ("gpt-oss-20b", 48),
        ("smollm2-135m", 22.5),
        ("phi-3-mini", 384),
        ("qwen2.5-7b", 56),
        ("qwen3-next-80b-a3b", 24),  # 12 of 48 layers attend
    ],
)
def test_a_token_takes_the_published_bytes(name, kib_per_token):
    assert model_geometry(name).kv_bytes_per_token == kib_per_token * KIB


@pytest.mark.parametrize(
    ("name", "billions", "active_billions"),
    [
        ("opt-13b", 12.85, 12.85),
        ("opt-66b", 65.7, 65.7),
        ("opt-175b", 174.6, 174.6),
        ("llama-13b", 13.02, 13.02),
        ("llama-3-8b", 8.03, 7.5),
        ("llama-3.1-405b", 405.9, 403.7),
        ("llama-3.2-1b", 1.236, 1.236),
        ("mistral-7b", 7.25, 7.11),
        ("mixtral-8x7b", 46.7, 12.9),
        ("qwen2.5-72b", 72.7, 71.5),
        ("qwen3-8b", 8.19, 7.57),
        ("qwen3-30b-a3b", 30.5, 3.0),
        ("gemma-3-27b", 27.0, 27.0),
        ("deepseek-v3", 671, 37),
        ("kimi-k2", 1026, 32),
        ("gpt-oss-20b", 20.9, 3.6),
        ("gpt-oss-120b", 116.8, 5.1),
        ("smollm2-135m", 0.1345, 0.1345),
        ("phi-3-mini", 3.82, 3.72),
        ("falcon-7b", 6.92, 6.92),
        ("falcon-40b", 41.3, 41.3),
    ],
)
def test_parameters_are_estimated_within_two_percent_of_the_published_count(
    name, billions, active_billions
):
    geometry = model_geometry(name)
    assert geometry.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert geometry.num_active_parameters / 1e9 == pytest.approx(active_billions, rel=0.02)


def test_all_built_in_models_have_a_geometry_and_say_where_it_comes_from():
    assert len(built_in_models()) >= 16
    for name in built_in_models():
        geometry = model_geometry(name)
        assert geometry.name == name
        assert BUILT_IN_CONFIGS[name][0] in geometry.source
        assert geometry.weight_bytes > geometry.expert_weight_bytes >= 0
        assert 0 <= geometry.routed_share < 1
        assert geometry.max_model_len >= 2048


def test_every_query_head_has_its_own_keys_unless_the_config_says_otherwise():
    assert kv_bytes(num_key_value_heads=None) == 2 * 2 * 8 * 8 * 2
    assert kv_bytes() == 2 * 2 * 2 * 8 * 2
    assert kv_bytes(num_key_value_heads=1) == 2 * 2 * 1 * 8 * 2


def test_a_head_size_that_is_given_wins_over_the_derived_one():
    assert kv_bytes(head_dim=128) == 2 * 2 * 2 * 128 * 2
    assert model_geometry(config(head_dim=128)).head_dim == 128
    assert model_geometry(config()).head_dim == 8


def test_values_may_be_narrower_than_keys():
    assert kv_bytes(head_dim=192, v_head_dim=128) == 2 * 2 * (192 + 128) * 2


@pytest.mark.parametrize(
    ("kv_dtype", "bytes_a_value"),
    [("auto", 2), ("fp16", 2), ("bf16", 2), ("fp32", 4), ("fp8", 1), ("int8", 1), ("FP8_e4m3", 1)],
)
def test_the_kv_dtype_scales_the_bytes_and_leaves_the_weights(kv_dtype, bytes_a_value):
    geometry = model_geometry(config(), kv_dtype=kv_dtype)
    assert geometry.kv_bytes_per_token == 2 * 2 * 2 * 8 * bytes_a_value
    assert geometry.weight_bytes == model_geometry(config()).weight_bytes


def test_auto_takes_the_dtype_of_the_config_under_either_name():
    assert model_geometry(config(torch_dtype="float32")).kv_dtype == "fp32"
    assert model_geometry(config(torch_dtype=None, dtype="torch.float16")).kv_dtype == "fp16"
    with pytest.raises(InvalidInput, match="field 'torch_dtype': missing: say which KV dtype"):
        model_geometry(config(torch_dtype=None))
    assert model_geometry(config(torch_dtype=None), kv_dtype="fp16").kv_dtype == "fp16"


def test_a_latent_is_shared_by_all_heads_and_an_indexer_adds_its_key():
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert kv_bytes(**latent) == 2 * (512 + 64) * 2
    assert kv_bytes(**latent, index_head_dim=128) == 2 * ((512 + 64) * 2 + 128 + 4)


def test_old_and_new_falcon_differ_in_which_field_counts():
    falcon = {"model_type": "falcon", "num_key_value_heads": None, "num_kv_heads": 4}
    assert kv_bytes(**falcon, multi_query=True) == 2 * 2 * 1 * 8 * 2
    assert kv_bytes(**falcon, multi_query=False) == 2 * 2 * 8 * 8 * 2
    assert kv_bytes(**falcon, new_decoder_architecture=True) == 2 * 2 * 4 * 8 * 2


def test_names_of_older_families_are_understood():
    gpt2 = {
        "model_type": "gpt2",
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
        "torch_dtype": "float32",
    }
    geometry = model_geometry(gpt2)
    assert geometry.kv_bytes_per_token == 12 * 2 * 768 * 4
    assert geometry.num_parameters == pytest.approx(124.44e6, rel=0.002)
    assert geometry.max_model_len == 1024


def test_the_text_part_of_a_model_of_several_parts_counts():
    nested = {
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
    }
    geometry = model_geometry(nested)
    known = model_geometry("gemma-3-4b")
    assert geometry.kv_bytes_per_token == known.kv_bytes_per_token
    assert geometry.num_parameters == known.num_parameters


def test_windowed_layers_count_in_full_and_the_user_is_told():
    geometry = model_geometry(
        config(sliding_window=128, layer_types=["sliding_attention", "full_attention"])
    )
    assert geometry.kv_bytes_per_token == kv_bytes()
    assert geometry.remarks == (
        "1 of 2 layers attend within a window only; memory and time are counted as if they kept "
        "every token",
    )
    assert model_geometry("gemma-3-27b").remarks[0].startswith("52 of 62 layers")
    assert model_geometry("mistral-7b").remarks == ()
    assert model_geometry(config(model_type="qwen2", sliding_window=64)).remarks == ()


@pytest.mark.parametrize(
    ("changes", "attending"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, 1),
        ({"num_hidden_layers": 8, "full_attention_interval": 4}, 2),
        ({"num_hidden_layers": 8, "attn_layer_period": 8, "attn_layer_offset": 4}, 1),
        ({"num_hidden_layers": 6, "full_attn_idxs": [2, 5]}, 2),
        ({"num_hidden_layers": 4, "linear_attn_config": {"full_attn_layers": [4]}}, 1),
        ({"num_hidden_layers": 5, "hybrid_override_pattern": "M-M*-"}, 1),
        ({"num_hidden_layers": 6, "num_kv_shared_layers": 2}, 4),
    ],
)
def test_recurrent_and_shared_layers_keep_nothing_for_a_token(changes, attending):
    geometry = model_geometry(config(**changes))
    assert geometry.num_kv_layers == attending
    assert geometry.kv_bytes_per_token == attending * 2 * 2 * 8 * 2


def test_parameters_are_the_weight_matrices():
    geometry = model_geometry(config())
    attention = 64 * 64 + 2 * 64 * 16 + 64 * 64
    layers = 2 * (attention + 3 * 64 * 128)
    assert geometry.num_parameters == 2 * 1000 * 64 + layers
    assert geometry.num_active_parameters == 1000 * 64 + layers
    assert geometry.weight_bytes == 2 * geometry.num_parameters
    tied = model_geometry(config(tie_word_embeddings=True))
    assert tied.num_parameters == tied.num_active_parameters == 1000 * 64 + layers


def test_a_token_uses_its_share_of_the_experts():
    experts = {
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    }
    geometry = model_geometry(config(**experts))
    dense = model_geometry(config())
    mlp, expert = 3 * 64 * 128, 3 * 64 * 32
    assert geometry.num_parameters == dense.num_parameters - mlp + 64 * 16 + 17 * expert
    assert geometry.num_active_parameters == (
        dense.num_active_parameters - mlp + 64 * 16 + 5 * expert
    )
    assert geometry.expert_weight_bytes == 16 * expert * 2
    assert geometry.routed_share == 0.25
    every_second = experts | {"first_k_dense_replace": 0, "decoder_sparse_step": 2}
    geometry = model_geometry(config(**every_second, num_hidden_layers=5))
    assert geometry.expert_weight_bytes == 2 * 16 * expert * 2


def test_quantised_weights_are_smaller_by_what_the_config_says():
    assert model_geometry("deepseek-v3").weight_bytes / 1e9 == pytest.approx(673, rel=0.01)
    assert model_geometry("gpt-oss-20b").weight_bytes / 1e9 == pytest.approx(13.76, rel=0.01)
    plain = model_geometry(config())
    embeddings = 2 * 1000 * 64 * 2
    awq = model_geometry(config(quantization_config={"quant_method": "awq", "bits": 4}))
    assert awq.weight_bytes == embeddings + (plain.weight_bytes - embeddings) / 4
    assert awq.kv_bytes_per_token == plain.kv_bytes_per_token
    odd = model_geometry(config(quantization_config={"quant_method": "new"}))
    assert odd.weight_bytes == plain.weight_bytes
    assert "'new' is not known here" in odd.remarks[0]


def test_attention_work_counts_keys_and_values_of_all_query_heads():
    assert model_geometry(config()).attention_flops_per_pair == 2 * 8 * 2 * (8 + 8)


@pytest.mark.parametrize("name", ["LLAMA-3-8B", " llama_3 8b ", "meta-llama/Llama-3-8b"])
def test_names_match_whatever_their_case_separator_and_organisation(name):
    assert built_in_name(name) == "llama-3-8b"


def test_a_file_or_its_folder_works_as_well_as_a_name(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    for path in (folder, folder / "config.json", str(folder)):
        geometry = model_geometry(path)
        assert geometry.kv_bytes_per_token == kv_bytes()
        assert geometry.name == "my-model"
        assert geometry.source == str(folder / "config.json")


def test_a_path_is_a_path_whatever_the_folder_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="no such file"):
        model_geometry("./opt-13b")
    folder = tmp_path / "opt-13b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    for path in ("./opt-13b", str(folder)):
        assert model_geometry(path) != model_geometry("opt-13b")
        assert model_geometry(path).source.endswith("opt-13b/config.json")


def test_an_unknown_name_lists_close_ones_and_says_that_a_file_works():
    with pytest.raises(InvalidInput) as caught:
        model_geometry("llama3-8b")
    message = str(caught.value)
    assert message.startswith("unknown model 'llama3-8b': did you mean llama-3-8b")
    assert "config.json" in message and "\n" not in message
    with pytest.raises(InvalidInput, match=r"known: opt-6\.7b"):
        model_geometry("zzzzzz")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1,\n oops}', "line 2: not JSON"),
        ("[1, 2]", "a model config is a JSON object"),
        ("", "line 1: not JSON"),
    ],
)
def test_a_file_that_is_no_config_is_named_in_one_line(tmp_path, text, problem):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InvalidInput) as caught:
        model_geometry(path)
    assert str(path) in str(caught.value) and problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_binary_file_is_no_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(InvalidInput, match="not a JSON text file"):
        model_geometry(path)


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers", "missing"),
        ({"hidden_size": None}, "hidden_size", "missing"),
        ({"num_attention_heads": None}, "num_attention_heads", "missing"),
        ({"vocab_size": None}, "vocab_size", "missing"),
        ({"hidden_size": "64"}, "hidden_size", "must be a whole number, not '64'"),
        ({"hidden_size": True}, "hidden_size", "must be a whole number, not True"),
        ({"num_key_value_heads": 0}, "num_key_value_heads", "must be at least 1, not 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "cannot share 3 KV heads"),
        ({"num_attention_heads": 6}, "head_dim", "no multiple of 6 heads"),
        ({"layer_types": ["full_attention"]}, "layer_types", "names 1 layers, the model has 2"),
        ({"layer_types": ["quantum", "moe"]}, "layer_types", "unknown kind of layer 'quantum'"),
        ({"layer_types": "full"}, "layer_types", "must be a list"),
        ({"layer_types": ["mamba", "mamba"]}, "num_hidden_layers", "no layer attends"),
        ({"torch_dtype": "float7"}, "torch_dtype", "unknown dtype 'float7'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", "must be true or false"),
        ({"quantization_config": 3}, "quantization_config", "must be an object"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim", "missing"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok", "5 of 4 experts"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(tmp_path, changes, field, problem):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config(**changes)))
    with pytest.raises(InvalidInput) as caught:
        model_geometry(path)
    assert str(caught.value).startswith(f"{path}, field {field!r}: ")
    assert problem in str(caught.value)


def test_an_unknown_kv_dtype_lists_the_known_ones():
    with pytest.raises(InvalidInput, match="unknown KV dtype 'fp7': choose from auto, fp16"):
        model_geometry("opt-13b", kv_dtype="fp7")
