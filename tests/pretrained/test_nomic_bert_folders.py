"""Check folders of nomic-bert without torch: both styles of config.json, names, what is refused."""

import json

import chex
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.drawn import drawn
from transformer_jax.config import ConfigError, Rope
from transformer_jax.pretrained.config_json import read_config
from transformer_jax.pretrained.load import load_pretrained
from transformer_jax.pretrained.save import save_pretrained

pytestmark = pytest.mark.usefixtures("quick_compilation")

OLD = dict(
    model_type="nomic_bert", activation_function="swiglu", architectures=["NomicBertModel"],
    auto_map={"AutoModel": "modeling_hf_nomic_bert.NomicBertModel"}, attn_pdrop=0.0, causal=False,
    dense_seq_output=True, embd_pdrop=0.0, fused_bias_fc=True, fused_dropout_add_ln=True,
    layer_norm_epsilon=1e-12, max_trained_positions=2048, mlp_fc1_bias=False, mlp_fc2_bias=False,
    n_embd=12, n_head=3, n_inner=10, n_layer=2, n_positions=64, pad_vocab_size_multiple=64,
    parallel_block=False, parallel_block_tied_norm=False, prenorm=False, qkv_proj_bias=False,
    reorder_and_upcast_attn=False, resid_pdrop=0.0, rotary_emb_base=1000, rotary_emb_fraction=1.0,
    rotary_emb_interleaved=False, rotary_emb_scale_base=None, rotary_scaling_factor=None,
    scale_attn_by_inverse_layer_idx=False, scale_attn_weights=True, type_vocab_size=2,
    use_flash_attn=True, use_rms_norm=False, use_xentropy=True, vocab_size=29,
)  # fmt: skip
"""The config.json that the model's own code reads."""
NEW = dict(
    model_type="nomic_bert", hidden_size=12, num_attention_heads=3, intermediate_size=10,
    num_hidden_layers=2, max_position_embeddings=64, vocab_size=29, head_dim=4,
    rope_parameters=dict(rope_type="default", rope_theta=1000.0),
)  # fmt: skip
NAMES = tuple(map(str, range(20)))


def read(content, names=NAMES):
    return read_config(content, names, "config.json")


def test_both_styles_mean_the_same():
    config = read(OLD)
    assert config == read(NEW | dict(head_dim=None))
    assert (config.d_model, config.d_ff, config.num_layers, config.max_len) == (12, 10, 2, 64)
    assert config.positions == Rope(base=1000.0) and config.glu and config.activation == "silu"
    assert read(OLD | dict(rotary_emb_base=70)).positions.base == 70.0
    both = read(OLD | dict(n_layer=5, num_hidden_layers=2))  # transformers reads its own name
    assert both == config


def test_a_folder_like_one_of_the_older_style_keeps_its_words(tmp_path):
    config = read(OLD)
    params = drawn(config)
    save_pretrained(tmp_path / "new", config, params)
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    block, prefix = params["encoder"]["block_1"], "nomic_bert.encoder.layers.1"
    value = np.asarray(block["attention"]["value"]["kernel"])
    np.testing.assert_array_equal(
        tensors[f"{prefix}.attn.Wqkv.weight"][24:], value.reshape(12, 12).T
    )
    for name, theirs in (("up", "fc11"), ("gate", "fc12")):
        kernel = np.asarray(block["feed_forward"][name]["kernel"])
        np.testing.assert_array_equal(tensors[f"{prefix}.mlp.{theirs}.weight"], kernel.T)
    content = json.loads((tmp_path / "new" / "config.json").read_text())
    assert content["rope_parameters"] == NEW["rope_parameters"] and "n_embd" not in content

    (tmp_path / "new" / "config.json").write_text(json.dumps(OLD))
    found, loaded = load_pretrained(tmp_path / "new")
    assert found == config
    chex.assert_trees_all_equal(loaded, params, strict=True)
    save_pretrained(tmp_path / "like", found, loaded, like=tmp_path / "new")
    again = json.loads((tmp_path / "like" / "config.json").read_text())
    assert {name: again[name] for name in OLD} == OLD and "hidden_size" not in again
    files = (tmp_path / name / "model.safetensors" for name in ("new", "like"))
    one, two = (file.read_bytes() for file in files)
    assert one == two


@pytest.mark.parametrize(
    ("style", "changes", "rule"),
    [
        (OLD, dict(activation_function="gelu"), "activation_function is 'gelu': must be 'swiglu'"),
        (OLD, dict(prenorm=True), "prenorm is True: must be False"),
        (OLD, dict(qkv_proj_bias=True), "qkv_proj_bias is True: must be False"),
        (OLD, dict(rotary_emb_fraction=0.5), "rotary_emb_fraction is 0.5: must be 1.0 or 1"),
        (OLD, dict(rotary_scaling_factor=2.0), "rotary_scaling_factor is 2.0: must be None"),
        (OLD, dict(num_experts=8), "num_experts is 8: no such key"),
        (NEW, dict(tie_word_embeddings="no"), "tie_word_embeddings is 'no': must be true or"),
        (NEW, dict(partial_rotary_factor=0.5), "rope_parameters is .*: all dimensions of a head"),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_name(style, changes, rule):
    with pytest.raises(ConfigError, match=rule):
        read(style | changes)


def test_spans_are_refused_by_name():
    with pytest.raises(ConfigError, match="architectures is None: transformers has no such head"):
        read(NEW, ("qa_outputs.weight", *NAMES))
