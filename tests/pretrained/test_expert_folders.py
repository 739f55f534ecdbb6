"""Check folders of decoders of experts, whose files hold the experts one by one."""

import json
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.drawn import drawn
from transformer_jax.config import ConfigError, Experts, LoraConfig
from transformer_jax.models.lora import init_lora
from transformer_jax.models.stack import stack_layers, unstack_layers
from transformer_jax.pretrained.config_json import read_config, write_config
from transformer_jax.pretrained.families import FAMILIES
from transformer_jax.pretrained.load import load_pretrained
from transformer_jax.pretrained.peft import save_lora
from transformer_jax.pretrained.safetensors_folder import CheckpointError
from transformer_jax.pretrained.save import save_pretrained
from transformer_jax.pretrained.tensors import tensor_names

pytestmark = pytest.mark.usefixtures("quick_compilation")

MIXTRAL = dict(
    model_type="mixtral", vocab_size=29, hidden_size=12, intermediate_size=10,
    num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, num_local_experts=3,
    max_position_embeddings=17,
)  # fmt: skip
QWEN = dict(
    model_type="qwen3_moe", vocab_size=29, hidden_size=12, intermediate_size=10, head_dim=4,
    num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, num_experts=4,
    moe_intermediate_size=6, num_experts_per_tok=3, max_position_embeddings=17,
)  # fmt: skip
QWEN2 = QWEN | dict(model_type="qwen2_moe", shared_expert_intermediate_size=8)
QWEN2.pop("head_dim")


def made(content):
    config = read_config(content, (), "config.json")
    return config, drawn(config)


@pytest.mark.slow_except("mixtral")
@pytest.mark.parametrize("content", [MIXTRAL, QWEN2], ids=lambda c: c["model_type"])
def test_every_expert_is_a_tensor_and_comes_back_in_its_place(content, tmp_path):
    config, params = made(content)
    save_pretrained(tmp_path / "looped", config, params, family=content["model_type"])
    scanned = replace(config, scan_layers=True)
    save_pretrained(tmp_path / "scanned", scanned, stack_layers(params))
    one, two = (load_file(tmp_path / n / "model.safetensors") for n in ("looped", "scanned"))
    assert one.keys() == two.keys()
    assert all(one[name].tobytes() == two[name].tobytes() for name in one)
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    if content is QWEN2:
        name = "model.layers.1.mlp.experts.2.up_proj.weight"
    up = params["decoder"]["block_1"]["feed_forward"]["up"]["kernel"]
    np.testing.assert_array_equal(one[name], np.asarray(up[2]).T)
    back, loaded = load_pretrained(tmp_path / "looped")
    assert back == config
    chex.assert_trees_all_equal(loaded, params, strict=True)
    back, loaded = load_pretrained(tmp_path / "looped", scan_layers=True)
    assert back == scanned
    chex.assert_trees_all_equal(unstack_layers(loaded), params, strict=True)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (MIXTRAL | dict(router_jitter_noise=0.1), "router_jitter_noise is 0.1: must be 0.0"),
        (MIXTRAL | dict(num_experts_per_tok=4), "top_k is 4: must be at most count, 3"),
        (MIXTRAL | dict(num_local_experts=0), "num_local_experts is 0: must be an integer from 1"),
        (QWEN | dict(model_type="olmoe", clip_qkv=8.0), "clip_qkv is 8.0: must be None"),
        (QWEN | dict(mlp_only_layers=[1]), r"mlp_only_layers is \[1\]: must be \[\] or None"),
        (QWEN | dict(decoder_sparse_step=2), "decoder_sparse_step is 2: must be 1"),
        (QWEN | dict(use_sliding_window=True), "use_sliding_window is True: must be False"),
        (QWEN | dict(norm_topk_prob="yes"), "norm_topk_prob is 'yes': must be true or false"),
        (QWEN | dict(router_aux_loss_coef=-1), "balance_loss is -1: must not be negative"),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_name(content, rule):
    with pytest.raises(ConfigError, match=rule):
        read_config(content, (), "config.json")


@pytest.mark.parametrize(
    ("content", "changes"),
    [
        (MIXTRAL, dict(score="sigmoid")),
        (MIXTRAL, dict(normalize=False)),
        (MIXTRAL, dict(shared_d_ff=3)),
        (QWEN, dict(scale=2.0)),
        (QWEN, dict(z_loss=0.1)),
        (QWEN, dict(selection_bias=True)),
        (QWEN2, dict(shared_gate=False)),
    ],
)
def test_what_a_family_cannot_say_is_refused_by_name(content, changes):
    config = read_config(content, (), "config.json")
    config = replace(config, experts=replace(config.experts, **changes))
    with pytest.raises(ConfigError, match=f"experts.{next(iter(changes))} is"):
        write_config(FAMILIES[content["model_type"]], config)


def test_a_dense_family_has_no_experts():
    config = read_config(MIXTRAL, (), "config.json")
    with pytest.raises(ConfigError, match="experts is Experts"):
        write_config(FAMILIES["mistral"], config)
    with pytest.raises(ConfigError, match="experts is None"):
        write_config(FAMILIES["mixtral"], replace(config, experts=None))


def test_adapters_of_experts_are_no_file_of_peft(tmp_path):
    config, params = made(MIXTRAL)
    lora = LoraConfig(rank=2, targets=("query", "up"))
    adapters = jax.tree.map(np.ones_like, init_lora(params, lora, jax.random.key(0)))
    names = tensor_names(config, "mixtral")
    with pytest.raises(ValueError, match="block_0/feed_forward/up: is of experts, whose adapters"):
        save_lora(tmp_path / "a", params, adapters, lora, names)


def test_more_experts_than_tensors_are_refused_before_they_are_listed(tmp_path):
    config, params = made(MIXTRAL)
    save_pretrained(tmp_path / "m", config, params)
    file = tmp_path / "m" / "config.json"
    for count, rule in ((10**9, "num_local_experts is 1000000000: the files have"), (30, "30 exp")):
        file.write_text(json.dumps(MIXTRAL | dict(num_local_experts=count)))
        with pytest.raises(ConfigError, match=rule):
            load_pretrained(tmp_path / "m")


def test_an_expert_that_is_missing_or_has_another_dtype_is_named(tmp_path):
    config, params = made(MIXTRAL)
    save_pretrained(tmp_path / "m", config, params)
    file = tmp_path / "m" / "model.safetensors"
    tensors, name = load_file(file), "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    save_file(tensors | {name: tensors[name].astype(np.float16)}, file)
    with pytest.raises(CheckpointError, match="kernel/1 is float16, those before it are float32"):
        load_pretrained(tmp_path / "m")
    config, _ = load_pretrained(tmp_path / "m", dtype="float32")
    assert config.experts == Experts(count=3, top_k=2, balance_loss=0.001)
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        load_pretrained(tmp_path / "m")
