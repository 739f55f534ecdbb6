"""Check folders of families with parallel branches and with LayerNorm: shared tensors, and keys
that are refused."""

import json

import jax
import numpy as np
import pytest

from transformer_jax.config import ConfigError
from transformer_jax.models.factory import init_params
from transformer_jax.pretrained.config_json import read_config, write_config
from transformer_jax.pretrained.families import FAMILIES
from transformer_jax.pretrained.families.table import Layout, Rows, joined
from transformer_jax.pretrained.load import load_pretrained
from transformer_jax.pretrained.save import save_pretrained

pytestmark = pytest.mark.usefixtures("quick_compilation")

NEOX = dict(
    model_type="gpt_neox", vocab_size=29, hidden_size=24, intermediate_size=11,
    num_hidden_layers=2, num_attention_heads=3, max_position_embeddings=17,
)  # fmt: skip
GPTJ = dict(model_type="gptj", vocab_size=29, n_embd=24, n_layer=2, n_head=3, rotary_dim=4)
PHI = NEOX | dict(model_type="phi")
CODER = PHI | dict(model_type="starcoder2", num_key_value_heads=1)
STABLE = PHI | dict(model_type="stablelm", num_key_value_heads=1)
OPT = dict(model_type="opt", vocab_size=29, hidden_size=24, ffn_dim=11, num_attention_heads=3)
BLOOM = dict(model_type="bloom", vocab_size=29, hidden_size=24, n_layer=2, n_head=3)


def test_rows_that_take_turns_are_cut_and_joined_as_numpy_does():
    """Cut 3 runs of 2 + 1 + 4 rows with 5 inputs, and biases of as many rows."""
    whole = np.arange(3 * 7 * 5).reshape(21, 5)
    runs = whole.reshape(3, 7, 5)
    layouts, pieces = [], []
    for start, count in ((0, 2), (2, 1), (3, 4)):
        layout = Layout("linear", rows=Rows(3, start, count, 7))
        param = layout.read(whole, (5, 3, count))
        np.testing.assert_array_equal(param, runs[:, start : start + count].transpose(2, 0, 1))
        assert layout.file_shape((5, 3, count)) == (21, 5)
        layouts.append(layout)
        pieces.append(layout.write(param))
    np.testing.assert_array_equal(joined(layouts, pieces), whole)
    flat = [Layout("flat", rows=layout.rows) for layout in layouts]
    biases = [layout.read(whole[:, 0], (3, layout.rows.count)) for layout in flat]
    assert flat[0].file_shape((3, 2)) == (21,)
    back = joined(flat, [x.write(bias) for x, bias in zip(flat, biases, strict=True)])
    np.testing.assert_array_equal(back, whole[:, 0])


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (NEOX | dict(rotary_pct=1.5), "rotary_pct is 1.5: must be at most 1"),
        (NEOX | dict(rotary_pct=0.4), "positions.dims is 3|dims is 3"),
        (NEOX | dict(num_key_value_heads=1), "num_key_value_heads is 1: no such key"),
        (NEOX | dict(rope_scaling=dict(type="spiral")), "type is 'spiral'"),
        (GPTJ | dict(rotary_dim=None), "rotary_dim is None: must be an integer"),
        (GPTJ | dict(rotary_dim=10), "rotary_dim is 10: must be even and at most 8"),
        (GPTJ | dict(rotary=False), "rotary is False: must be True"),
        (CODER | dict(norm_type="rms_norm"), "norm_type is 'rms_norm': must be 'layer_norm'"),
        (CODER | dict(mlp_type="gated"), "mlp_type is 'gated': must be 'default'"),
        (OPT | dict(word_embed_proj_dim=7), "word_embed_proj_dim is 7: must be hidden_size, 24"),
        (OPT | dict(_remove_final_layer_norm=True), "_remove_final_layer_norm is True: must be"),
        (OPT | dict(layer_norm_elementwise_affine=False), "layer_norm_elementwise_affine is False"),
        (BLOOM | dict(apply_residual_connection_post_layernorm=True), "post_layernorm is True"),
        (BLOOM | dict(n_inner=7), "n_inner is 7: must be"),
        (PHI | dict(qk_layernorm=True), "qk_layernorm is True: must be False"),
        (PHI | dict(embd_pdrop=1.0), "embd_pdrop is 1.0: must be at least 0 and below 1"),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_name(content, rule):
    with pytest.raises(ConfigError, match=rule):
        read_config(content, (), "config.json")


@pytest.mark.parametrize(
    ("content", "changes", "rule"),
    [
        (NEOX, dict(norm_order="parallel_shared"), "norm_order is 'parallel_shared'"),
        (NEOX, dict(out_bias=False), "out_bias is False: a gpt_neox has True"),
        (GPTJ, dict(qkv_bias=True), "qkv_bias is True: a gptj has False"),
        (STABLE, dict(norm_order="parallel"), "norm_order is 'parallel': a stablelm has 'pre'"),
        (CODER, dict(ff_bias=False), "ff_bias is False: a starcoder2 has True"),
        (OPT, dict(norm_order="parallel"), "norm_order is 'parallel': a opt has 'post'"),
        (BLOOM, dict(d_ff=7), "d_ff is 7: a bloom has 96"),
        (PHI, dict(norm_order="parallel"), "norm_order is 'parallel': a phi has 'parallel_shared'"),
    ],
)
def test_what_a_family_cannot_say_is_refused_by_name(content, changes, rule):
    from dataclasses import replace

    config = replace(read_config(content, (), "config.json"), **changes)
    with pytest.raises(ConfigError, match=rule):
        write_config(FAMILIES[content["model_type"]], config)


@pytest.mark.slow
@pytest.mark.parametrize("bare", [False, True])
def test_a_tied_pythia_is_read_with_its_head_and_without(bare, tmp_path):
    config = read_config(NEOX | dict(tie_word_embeddings=True), (), "config.json")
    params = jax.tree.map(
        lambda x: x + np.arange(x.size, dtype=np.float32).reshape(x.shape) / x.size,
        init_params(config, jax.random.key(3)),
    )
    save_pretrained(tmp_path / "one", config, params, family="gpt_neox")
    if bare:
        from safetensors.numpy import load_file, save_file

        file = load_file(tmp_path / "one" / "model.safetensors")
        (tmp_path / "two").mkdir()
        named = {name.removeprefix("gpt_neox."): x for name, x in file.items()}
        save_file(named, tmp_path / "two" / "model.safetensors")
        keys = json.loads((tmp_path / "one" / "config.json").read_text())
        (tmp_path / "two" / "config.json").write_text(json.dumps(keys))
    back, loaded = load_pretrained(tmp_path / ("two" if bare else "one"))
    assert back == config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
