"""Check folders of SmolLM 3, Cohere, StableLM and Falcon: what comes back, what is refused."""

from dataclasses import replace

import chex
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.drawn import drawn
from transformer_jax.config import ConfigError, Rope
from transformer_jax.pretrained.config_json import read_config, write_config
from transformer_jax.pretrained.families import FAMILIES
from transformer_jax.pretrained.load import load_pretrained
from transformer_jax.pretrained.save import save_pretrained

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = dict(
    vocab_size=29, hidden_size=12, intermediate_size=10, num_hidden_layers=4,
    num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=64,
)  # fmt: skip
SMOL = SMALL | dict(model_type="smollm3")
COHERE = SMALL | dict(model_type="cohere", rope_theta=1e4, use_qk_norm=True)
COHERE2 = SMALL | dict(model_type="cohere2", rope_theta=1e4, sliding_window=5)
FALCON = dict(
    model_type="falcon", vocab_size=29, hidden_size=24, num_hidden_layers=2, num_attention_heads=6,
)  # fmt: skip
STABLE = SMALL | dict(model_type="stablelm", qk_layernorm=True, partial_rotary_factor=0.5)


@pytest.mark.slow_except("falcon*")
@pytest.mark.parametrize(
    ("content", "tensor", "param"),
    [
        (SMOL, "model.layers.3.self_attn.k_proj.weight", "block_3/attention/key/kernel"),
        (COHERE, "model.layers.3.self_attn.q_norm.weight", "block_3/attention/query_scale"),
        (COHERE2, "model.layers.2.input_layernorm.weight", "block_2/norm/scale"),
        (FALCON, "transformer.h.1.mlp.dense_4h_to_h.weight", "block_1/feed_forward/down/kernel"),
        (
            STABLE,
            "model.layers.1.self_attn.q_layernorm.norms.2.weight",
            "block_1/attention/query_scale/2",
        ),
    ],
    ids=lambda part: part.get("model_type") if isinstance(part, dict) else "",
)
def test_what_is_saved_comes_back_bit_for_bit(content, tensor, param, tmp_path):
    config = read_config(content, (), "config.json")
    params = drawn(config)
    save_pretrained(tmp_path / "one", config, params, family=content["model_type"])
    back, loaded = load_pretrained(tmp_path / "one")
    assert back == config
    chex.assert_trees_all_equal(loaded, params, strict=True)
    own = params["decoder"]
    for name in param.split("/"):
        own = own[int(name)] if name.isdigit() else own[name]
    found = load_file(tmp_path / "one" / "model.safetensors")[tensor]
    own = own.reshape(len(own), -1).T if param.endswith("kernel") else own
    np.testing.assert_array_equal(found, own)


@pytest.mark.slow
def test_groups_of_a_falcon_are_their_queries_a_key_and_a_value(tmp_path):
    """Rows [K, N / K + 2, H] of one tensor."""
    keys = dict(new_decoder_architecture=True, num_kv_heads=2, bias=True)
    config = read_config(FALCON | keys, (), "config.json")
    params = drawn(config)
    save_pretrained(tmp_path / "one", config, params, family="falcon")
    name = "transformer.h.1.self_attention.query_key_value.weight"
    rows = load_file(tmp_path / "one" / "model.safetensors")[name].reshape(2, 5, 4, 24)
    own = params["decoder"]["block_1"]["attention"]
    for group in range(2):
        queries = np.moveaxis(own["query"]["kernel"][:, 3 * group : 3 * group + 3], 0, -1)
        np.testing.assert_array_equal(rows[group, :3], queries)
        np.testing.assert_array_equal(rows[group, 3], own["key"]["kernel"][:, group].T)
        np.testing.assert_array_equal(rows[group, 4], own["value"]["kernel"][:, group].T)
    back, loaded = load_pretrained(tmp_path / "one")
    assert back == config
    chex.assert_trees_all_equal(loaded, params, strict=True)


@pytest.mark.parametrize(
    ("keys", "heads", "order"),
    [
        ({}, 1, "parallel_shared"),
        (dict(multi_query=False, parallel_attn=False), 6, "pre"),
        (dict(multi_query=False, num_kv_heads=2), 6, "parallel_shared"),
        (dict(new_decoder_architecture=True, num_kv_heads=3), 3, "parallel"),
        (
            dict(new_decoder_architecture=True, num_kv_heads=3, num_ln_in_parallel_attn=1),
            3,
            "parallel_shared",
        ),
    ],
)
def test_a_falcon_of_either_architecture_is_read_and_written(keys, heads, order):
    config = read_config(FALCON | keys, (), "config.json")
    assert (config.kv_heads, config.norm_order) == (heads, order)
    written = write_config(FAMILIES["falcon"], config)
    assert read_config(written, (), "config.json") == config


@pytest.mark.parametrize(
    ("keys", "pattern", "window"),
    [
        ({}, (True, True, True, False), None),
        (dict(no_rope_layer_interval=2), (True, False), None),
        (dict(no_rope_layers=[1, 1, 1, 1, 0]), None, None),
        (
            dict(no_rope_layers=[0, 1, 0, 1], use_sliding_window=True, sliding_window=5),
            (False, True),
            (5, None),
        ),
        (dict(sliding_window=5), (True, True, True, False), None),
    ],
)
def test_layers_of_smollm3_turn_by_a_pattern(keys, pattern, window):
    config = read_config(SMOL | keys, (), "config.json")
    assert config.positions == Rope(base=2e6, pattern=pattern) and config.window == window
    written = write_config(FAMILIES["smollm3"], config)
    assert read_config(written, (), "config.json") == config


def test_layers_of_smollm3_that_all_have_no_rotation_have_no_positions():
    config = read_config(SMOL | dict(no_rope_layers=[0] * 4), (), "config.json")
    assert config.positions is None
    written = write_config(FAMILIES["smollm3"], config)
    assert written["no_rope_layers"] == [0] * 4
    assert read_config(written, (), "config.json") == config


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (COHERE | dict(rotary_pct=0.5), "rotary_pct is 0.5: must be 1.0"),
        (SMALL | dict(model_type="cohere"), "rope_theta is missing"),
        (COHERE2 | dict(use_qk_norm=True), "use_qk_norm is True: must be False"),
        (COHERE2 | dict(sliding_window=None), "sliding_window is None: must be an integer"),
        (COHERE2 | dict(order_of_interleaved_layers="x"), "order_of_interleaved_layers is 'x'"),
        (FALCON | dict(alibi=True), "alibi is True: must be False"),
        (FALCON | dict(num_ln_in_parallel_attn=2), "num_ln_in_parallel_attn is 2: must be 1, or"),
        (
            FALCON | dict(new_decoder_architecture=True, parallel_attn=False),
            "parallel_attn is False: new_decoder_architecture needs true",
        ),
        (SMOL | dict(no_rope_layers=[1]), r"no_rope_layers is \[1\]: must be a list of 4"),
        (SMOL | dict(no_rope_layers=[2, 1, 1, 1]), "no_rope_layers is .*: must be a list of 4"),
        (
            SMOL | dict(layer_types=["sliding_attention"] * 4),
            "layer_types is .*: needs use_sliding_window and sliding_window",
        ),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_name(content, rule):
    with pytest.raises(ConfigError, match=rule):
        read_config(content, (), "config.json")


@pytest.mark.parametrize(
    ("content", "family", "changes", "rule"),
    [
        (SMOL, "llama", {}, r"positions.pattern is \(True, True, True, False\): a llama has"),
        (SMOL, "smollm3", dict(qk_norm=True), "qk_norm is True: a smollm3 has False"),
        (COHERE, "cohere", dict(qk_norm_kind="rmsnorm"), "qk_norm_kind is 'rmsnorm': a cohere has"),
        (COHERE2, "cohere2", dict(window=5), r"window is \[5, 5, 5, 5\]|pattern is"),
        (STABLE, "stablelm", dict(qk_norm_over="head"), "qk_norm_over is 'head': a stablelm has"),
    ],
)
def test_what_a_family_cannot_say_is_refused_by_name(content, family, changes, rule):
    config = replace(read_config(content, (), "config.json"), **changes)
    with pytest.raises(ConfigError, match=rule):
        write_config(FAMILIES[family], config)
