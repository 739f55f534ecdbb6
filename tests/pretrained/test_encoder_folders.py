"""Check folders of MPNet, ELECTRA and ALBERT without torch: where tensors lie, what is refused."""

import json
from dataclasses import replace

import chex
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.drawn import drawn
from transformer_jax.config import ConfigError, Learned
from transformer_jax.inside import logit_lens
from transformer_jax.models.factory import build
from transformer_jax.models.flops import forward_flops
from transformer_jax.models.places import places
from transformer_jax.pretrained.config_json import read_config, write_config
from transformer_jax.pretrained.families import FAMILIES
from transformer_jax.pretrained.load import load_pretrained
from transformer_jax.pretrained.save import save_pretrained

pytestmark = pytest.mark.usefixtures("quick_compilation")

MPNET = dict(
    model_type="mpnet", vocab_size=29, hidden_size=12, intermediate_size=10, num_hidden_layers=2,
    num_attention_heads=3, max_position_embeddings=34, layer_norm_eps=1e-5,
    relative_attention_num_buckets=32, pad_token_id=1, hidden_act="gelu",
)  # fmt: skip
ELECTRA = dict(
    model_type="electra", vocab_size=29, embedding_size=5, hidden_size=12, intermediate_size=10,
    num_hidden_layers=2, num_attention_heads=3, max_position_embeddings=32, hidden_act="gelu",
    summary_type="first", summary_use_proj=True, type_vocab_size=2,
)  # fmt: skip
ALBERT = dict(
    model_type="albert", vocab_size=29, embedding_size=5, hidden_size=12, intermediate_size=10,
    num_hidden_layers=7, num_attention_heads=3, max_position_embeddings=32, type_vocab_size=2,
    num_hidden_groups=1, inner_group_num=1, hidden_dropout_prob=0, gap_size=0, layers_to_keep=[],
    attention_probs_dropout_prob=0, classifier_dropout_prob=0.1, down_scale_factor=1,
    net_structure_type=0, num_memory_blocks=0,
)  # fmt: skip
NAMES = tuple(map(str, range(40)))


def read(content, names=NAMES):
    return read_config(content, names, "config.json")


def written(tmp_path, config):
    """Save fresh parameters, check that they are read back, and return them beside the file's."""
    params = drawn(config)
    save_pretrained(tmp_path / "m", config, params)
    back, loaded = load_pretrained(tmp_path / "m")
    assert back == config
    chex.assert_trees_all_equal(loaded, params, strict=True)
    return params, load_file(tmp_path / "m" / "model.safetensors")


def test_mpnet_has_vectors_of_positions_and_biases_of_distances(tmp_path):
    config = read(MPNET, ("mpnet.pooler.dense.weight", *NAMES))
    assert config.positions == Learned(offset=2, buckets=32) and config.max_len == 32
    assert config.type_vocab_size is None and config.pooler == "tanh"
    params, tensors = written(tmp_path, config)
    table = params["encoder"]["relative_bias"]
    assert table.shape == (32, 3)
    np.testing.assert_array_equal(tensors["mpnet.encoder.relative_attention_bias.weight"], table)
    out = np.asarray(params["encoder"]["block_1"]["attention"]["out"]["kernel"])
    np.testing.assert_array_equal(
        tensors["mpnet.encoder.layer.1.attention.attn.o.weight"], out.reshape(12, 12).T
    )


def test_a_discriminator_has_one_class_of_each_token(tmp_path):
    config = read(ELECTRA, ("discriminator_predictions.dense.weight", *NAMES))
    assert (config.num_classes, config.classes_of, config.embedding_dim) == (1, "token", 5)
    params, tensors = written(tmp_path, config)
    assert params["embed"]["tokens"].shape == (29, 5)
    project = np.asarray(params["embed"]["projection"]["kernel"])
    np.testing.assert_array_equal(tensors["electra.embeddings_project.weight"], project.T)
    dense = np.asarray(params["pooler"]["kernel"])
    np.testing.assert_array_equal(tensors["discriminator_predictions.dense.weight"], dense.T)
    content = json.loads((tmp_path / "m" / "config.json").read_text())
    assert content["architectures"] == ["ElectraForPreTraining"] and "num_labels" not in content


def test_embeddings_as_wide_as_the_blocks_have_no_projection(tmp_path):
    config = read(ELECTRA | dict(embedding_size=12), ("classifier.out_proj.weight", *NAMES))
    assert config.embedding_dim is None and config.pooler == "gelu"
    params, tensors = written(tmp_path, config)
    assert "projection" not in params["embed"]
    assert "electra.embeddings_project.weight" not in tensors


def test_the_layers_of_an_albert_are_one_block(tmp_path):
    config = read(ALBERT, ("albert.pooler.weight", *NAMES))
    assert config.share_layers and config.num_layers == 7 and config.activation == "gelu_tanh"
    params, tensors = written(tmp_path, config)
    assert [name for name in params["encoder"]] == ["block_0"]
    block = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    value = np.asarray(params["encoder"]["block_0"]["attention"]["value"]["kernel"])
    np.testing.assert_array_equal(
        tensors[f"{block}.attention.value.weight"], value.reshape(12, 12).T
    )
    assert sum(name.endswith("ffn.weight") for name in tensors) == 1
    content = json.loads((tmp_path / "m" / "config.json").read_text())
    assert content["num_hidden_groups"] == content["inner_group_num"] == 1
    one = replace(config, num_layers=1)
    products = forward_flops(config, 5) - 7 * forward_flops(one, 5)
    rest = 2 * 5 * 12 * 5 + 2 * 12 * 12  # the projection of 5 tokens, and the pooler
    assert products == -6 * rest
    with pytest.raises(ConfigError, match="share_layers is True: needs a looped stack"):
        load_pretrained(tmp_path / "m", scan_layers=True)


def test_narrow_embeddings_give_no_logits_without_the_head(rng):
    config = read(ELECTRA)
    tokens, params = rng.integers(0, 29, (1, 3)), drawn(config)
    assert "logits" not in places(config)
    with pytest.raises(ValueError, match="embedding_dim is 5: there are no logits of tokens"):
        build(config).apply({"params": params}, tokens)
    with pytest.raises(ValueError, match="logit_lens: embedding_dim is 5: such an encoder has no"):
        logit_lens(build(config), params, tokens)


@pytest.mark.parametrize(
    ("content", "changes", "rule"),
    [
        (ALBERT, dict(num_hidden_groups=2), "num_hidden_groups is 2: must be 1"),
        (ALBERT, dict(inner_group_num=2), "inner_group_num is 2: must be 1"),
        (ELECTRA, dict(embedding_size=0), "embedding_size is 0: must be an integer from 1"),
        (ELECTRA, dict(position_embedding_type="relative_key"), "is 'relative_key': must be"),
        (MPNET, dict(relative_attention_num_buckets=16), "num_buckets is 16: must be 32"),
        (MPNET, dict(pad_token_id=0), "pad_token_id is 0: must be 1"),
        (MPNET, dict(embedding_size=5), "embedding_size is 5: no such key"),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_name(content, changes, rule):
    with pytest.raises(ConfigError, match=rule):
        read(content | changes)


def test_a_generators_head_is_always_gelu():
    names = ("generator_predictions.dense.weight", *NAMES)
    with pytest.raises(ConfigError, match="hidden_act is 'relu': must be 'gelu' beside a head of"):
        read(ELECTRA | dict(hidden_act="relu"), names)


@pytest.mark.parametrize("positions", [Learned(offset=2), Learned(offset=2, buckets=16)])
def test_other_positions_are_not_written_as_an_mpnets(positions):
    config = read(MPNET)
    with pytest.raises(ConfigError, match=r"positions\.buckets is "):
        write_config(FAMILIES["mpnet"], replace(config, positions=positions))
