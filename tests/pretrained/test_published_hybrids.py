"""Decoders with layers that have a state, compared with `transformers`: steps, padding, documents.

test_published_decoders.py compares their logits, texts and gradients.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file

from tests.pretrained.test_published_decoders import (
    CASES,
    OLMO,
    STATES,
    VOCAB,
    Case,
    case,
)
from tests.support.published import (
    apply,
    assert_round_trip,
    assert_same_logits,
    positions,
    randomised,
    reopened,
    saved,
    tokens,
    torch,
    transformers,
)
from transformer_jax.config import ConfigError
from transformer_jax.models.factory import build, init_cache
from transformer_jax.pretrained.load import load_pretrained
from transformer_jax.pretrained.safetensors_folder import CheckpointError
from transformer_jax.pretrained.save import save_pretrained

AUTO = transformers.AutoModelForCausalLM
HYBRIDS = "qwen3 next", "qwen3.5", "olmo hybrid", "kimi", "lfm2"
NAMES = [name for name in CASES if name.startswith(HYBRIDS)]
SELDOM = [name for name in NAMES if "," in name]
pytestmark = pytest.mark.usefixtures("quick_compilation")

often = partial(pytest.mark.parametrize, "name", [
    pytest.param(name, marks=pytest.mark.slow if name in SELDOM else ()) for name in NAMES
])  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function that writes the folder of a case once."""

    @cache
    def folder(name: str) -> Path:
        return saved(randomised(CASES[name].create(), len(name)), tmp_path_factory.mktemp("m"))

    return folder


def alone(folder: Path, ids: np.ndarray) -> Any:  # f32[T, V]
    with torch.no_grad():
        return reopened(folder, AUTO)(torch.tensor(ids[None]).long()).logits[0]


def reader(config: Any, params: Any) -> Any:
    model = build(config)

    @jax.jit
    def read(ids: Any, cache: Any, at: Any) -> Any:
        return model.apply({"params": params}, ids, cache=cache, positions=at)

    return read


@often()
def test_steps_with_a_cache_match_transformers(name, folders, rng):
    """Two prompts with padding on the left, then 17 tokens, one at a time."""
    T, new = 23, 17
    ids = tokens(rng, VOCAB, 2, T + new)
    valid = np.arange(T + new) >= np.array([[0], [9]])
    config, params = load_pretrained(folders(name))
    model, read = reopened(folders(name), AUTO), reader(config, params)
    at, ours, theirs = positions(valid), init_cache(config, 2, T + new), None
    for start, end in ((0, T), *((t, t + 1) for t in range(T, T + new))):
        got, ours = read(ids[:, start:end], ours, at[:, start:end])
        with torch.no_grad():
            want = model(
                torch.tensor(ids[:, start:end]).long(), cache=theirs, use_cache=True,
                attention_mask=torch.tensor(valid[:, :end]).long(),
                position_ids=torch.tensor(at[:, start:end]).clamp(min=0).long(),
            )  # fmt: skip
        theirs = want.cache
        assert_same_logits(got, want.logits, valid[:, start:end])


@often()
def test_padding_on_the_right_changes_nothing(name, folders, rng):
    """The step after a padded prompt equals that of the prompt alone in transformers."""
    ids, length = tokens(rng, VOCAB, 2, 24), 14
    valid = np.arange(23) < np.array([[23], [length]])
    config, params = load_pretrained(folders(name))
    read, at = reader(config, params), positions(valid)
    _, after = read(ids[:, :23], init_cache(config, 2, 24), at)
    last = np.where(valid[:, -1:], ids[:, 23:], ids[:, length : length + 1])
    got, _ = read(last, after, at.max(axis=1, keepdims=True) + 1)
    for row, end in enumerate((23, length)):
        want = alone(folders(name), np.append(ids[row, :end], last[row]))[-1:]
        assert_same_logits(got[row : row + 1], want[None])


@often()
def test_documents_in_one_row_are_separate(name, folders, rng):
    ids, ends = tokens(rng, VOCAB, 1, 50), (0, 2, 21, 50)
    segments = np.searchsorted(ends[1:], np.arange(50), side="right")[None].astype(np.int32)
    config, params = load_pretrained(folders(name))
    got = apply(config, params)(ids, segments=segments)[0]
    for start, end in pairwise(ends):
        want = alone(folders(name), ids[0, start:end])
        assert_same_logits(got[:, start:end], want[None])


@pytest.mark.skipif(transformers.__version__ != "5.24.0", reason="a fault of this version")
@pytest.mark.parametrize("name", ["qwen3.5", "olmo hybrid"])
def test_transformers_reads_padding_on_the_right_and_other_documents(name, folders, rng):
    """docs/pretrained.md states that its numbers are wrong in these cases."""
    model, ids = reopened(folders(name), AUTO), torch.tensor(tokens(rng, VOCAB, 1, 9)).long()
    mask = torch.tensor([[1] * 6 + [0] * 3])
    with torch.no_grad():
        cache = model(ids, attention_mask=mask, use_cache=True).cache
        more = torch.tensor([[1] * 6 + [0] * 3 + [1]])
        last = dict(attention_mask=more, position_ids=torch.tensor([[6]]))
        padded = model(ids[:, :1], cache=cache, **last).logits[0, -1]
        plain = model(torch.cat([ids[:, :6], ids[:, :1]], dim=1)).logits[0, -1]
        at = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
        packed, own = model(ids, position_ids=at).logits[0, 4:], model(ids[:, 4:]).logits[0]
    assert (padded - plain).abs().max() > 0.01 and (packed - own).abs().max() > 0.01


def qwen_vision(tied: bool = False) -> Any:
    """Return a Qwen3.5 with a vision part."""
    text = CASES["qwen3.5"].create().config.to_dict() | dict(tie_word_embeddings=tied)
    vision = dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32,
        num_position_embeddings=16, patch_size=4,
    )  # fmt: skip
    config = transformers.Qwen3_5Config(
        text_config=text, vision_config=vision, tie_word_embeddings=tied
    )
    model = transformers.Qwen3_5ForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.sub_(5)
    return randomised(model, 3)


@pytest.mark.parametrize("tied", [False, True])
def test_text_part_of_qwen3_5_is_loaded(tied, rng, tmp_path):
    folder = saved(qwen_vision(tied), tmp_path / "whole")
    file = folder / "model.safetensors"  # published files also predict a second token
    save_file(load_file(file) | {"mtp.norm.weight": np.ones(32, np.float32)}, file)
    ids = tokens(rng, VOCAB, 2, 40)
    config, params = load_pretrained(folder)
    assert config.tie_embeddings == tied
    whole = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    with torch.no_grad():
        want = whole(torch.tensor(ids).long()).logits
    assert_same_logits(apply(config, params)(ids)[0], want)
    save_pretrained(tmp_path / "text", config, params, like=folder)
    written = json.loads((tmp_path / "text/config.json").read_text())
    assert written["model_type"] == "qwen3_5_text" and "vision_config" not in written
    assert_round_trip(tmp_path / "text", tmp_path, AUTO, input_ids=torch.tensor(ids).long())
    with torch.no_grad():
        again = reopened(tmp_path / "text", AUTO)(torch.tensor(ids).long()).logits
    assert_same_logits(again.numpy(), want)


def test_parts_of_qwen3_5_must_agree_about_tied_embeddings(tmp_path):
    folder = saved(qwen_vision(), tmp_path / "whole")
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(keys | dict(tie_word_embeddings=True)))
    rule = "tie_word_embeddings is True: must equal that of text_config, False"
    with pytest.raises(ConfigError, match=rule):
        load_pretrained(folder)


def test_olmo_hybrid_saved_by_transformers_loads_if_its_parts_are_equal(tmp_path, folders):
    """Its class saves other names of norms, and three equal parts of the convolution."""
    equal = dict(linear_key_head_dim=12, linear_value_head_dim=6)
    model = case("OlmoHybrid", **STATES | OLMO | equal).create()
    model.save_pretrained(tmp_path / "theirs")
    names = load_file(tmp_path / "theirs/model.safetensors").keys()
    assert any(name.endswith("attention_layer_norm.weight") for name in names)
    ours = load_pretrained(saved(model, tmp_path / "published"))
    got = load_pretrained(tmp_path / "theirs")
    assert got[0] == ours[0]
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), got[1], ours[1]))
    case("OlmoHybrid", **STATES | OLMO).create().save_pretrained(tmp_path / "unequal")
    rule = r"q_conv1d.weight has shape \[38, 1, 4\]: config.json requires \[24, 1, 4\]"
    with pytest.raises(CheckpointError, match=rule):
        load_pretrained(tmp_path / "unequal")


def test_kimi_linear_saved_by_transformers_loads_with_other_names(tmp_path, folders):
    """It names the matrices of the first layer like those of experts, and writes sizes twice."""
    published = dict(
        kda_layers=[1], full_attn_layers=[2], num_heads=3, head_dim=16, short_conv_kernel_size=4
    )
    changes = dict(layer_types=None, linear_attn_config=published)
    model = replace(CASES["kimi"], changes=CASES["kimi"].changes | changes).create()
    model.save_pretrained(tmp_path / "theirs")
    names = load_file(tmp_path / "theirs/model.safetensors").keys()
    assert "model.layers.0.block_sparse_moe.up_proj.weight" in names
    keys = json.loads((tmp_path / "theirs/config.json").read_text())
    assert keys["linear_attn_config"] == published and keys["linear_num_heads"] == 3
    config, params = load_pretrained(saved(model, tmp_path / "published"))
    got = load_pretrained(tmp_path / "theirs")
    assert got[0] == config
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), got[1], params))


def held_out_kimi(seed: int) -> Case:
    """Draw a configuration of Kimi Linear."""
    rng = np.random.default_rng(seed)
    one = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    layers, groups = int(rng.integers(2, 6)), one(1, 2)
    kinds = [*rng.permutation(["linear_attention", "full_attention"])]
    kinds += [one("linear_attention", "full_attention") for _ in range(layers - 2)]
    count, heads = groups * int(rng.integers(2, 4)), one(2, 3, 4)
    first = int(rng.integers(0, layers))
    changes = dict(
        hidden_size=one(24, 32, 36), num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, layer_types=[str(kind) for kind in kinds],
        linear_num_heads=int(rng.integers(1, 5)), linear_head_dim=int(rng.integers(8, 21)),
        linear_conv_kernel_dim=int(rng.integers(2, 6)), q_lora_rank=one(None, 9),
        kv_lora_rank=int(rng.integers(8, 17)), qk_nope_head_dim=int(rng.integers(4, 13)),
        qk_rope_head_dim=one(4, 6, 8), v_head_dim=int(rng.integers(4, 13)),
        num_local_experts=count, num_experts_per_tok=int(rng.integers(1, count // groups + 1)),
        n_group=groups, topk_group=int(rng.integers(1, groups + 1)), n_shared_experts=one(1, 2),
        moe_intermediate_size=one(8, 12), norm_topk_prob=one(False, True),
        routed_scaling_factor=one(1.0, 2.446), rms_norm_eps=one(1e-6, 1e-4),
        mlp_layer_types=["dense"] * first + ["sparse"] * (layers - first),
    )  # fmt: skip
    return replace(CASES["kimi"], changes=CASES["kimi"].changes | changes)


def held_out_lfm2(seed: int) -> Case:
    """Draw a configuration of LFM2."""
    rng = np.random.default_rng(seed)
    one = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    layers, heads, group = int(rng.integers(2, 6)), one(2, 4, 6), one(1, 2)
    kinds = [*rng.permutation(["conv", "full_attention"])]
    kinds += [one("conv", "full_attention") for _ in range(layers - 2)]
    return case(
        "Lfm2", hidden_size=heads * one(6, 8, 10), intermediate_size=int(rng.integers(20, 90)),
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // group,
        layer_types=[str(kind) for kind in kinds], conv_L_cache=int(rng.integers(1, 6)),
        conv_bias=one(False, True), block_auto_adjust_ff_dim=one(False, True, True),
        block_ffn_dim_multiplier=one(1, 1.0, 0.9), block_multiple_of=int(rng.integers(1, 20)),
        norm_eps=one(1e-5, 1e-3), tie_word_embeddings=one(False, True), **OLMO,
        rope_parameters=dict(rope_type="default", rope_theta=one(1e4, 1e6)),
    )  # fmt: skip


def held_out(seed: int) -> Case:
    """Draw a configuration of one of the other three families."""
    rng = np.random.default_rng(seed)
    one = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    name = ("Qwen3Next", "Qwen3_5", "OlmoHybrid")[seed % 3]
    layers, heads, group = int(rng.integers(2, 6)), one(2, 4, 6), one(1, 2)
    kinds = [*rng.permutation(["linear_attention", "full_attention"])]
    kinds += [one("linear_attention", "full_attention") for _ in range(layers - 2)]
    key_heads = int(rng.integers(1, 4))
    changes: dict[str, Any] = dict(
        hidden_size=heads * one(6, 8, 10), num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads // group, layer_types=[str(kind) for kind in kinds],
        linear_num_key_heads=key_heads, linear_num_value_heads=key_heads * one(1, 2, 3),
        linear_key_head_dim=int(rng.integers(8, 21)),
        linear_value_head_dim=int(rng.integers(8, 25)),
        linear_conv_kernel_dim=int(rng.integers(2, 6)), attention_bias=one(False, True),
        rms_norm_eps=one(1e-6, 1e-4), tie_word_embeddings=one(False, True),
    )  # fmt: skip
    spec = one(
        dict(rope_type="default", rope_theta=500.0),
        dict(rope_type="linear", rope_theta=1e4, factor=3.0),
        dict(
            rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=32
        ),
    )  # fmt: skip
    if name == "OlmoHybrid":
        return case(
            name, **changes, **OLMO, linear_allow_neg_eigval=one(False, True),
            rope_parameters=one(spec, dict(rope_type="default", rope_theta=None)),
        )  # fmt: skip
    changes |= dict(
        head_dim=one(8, 16, 24),
        rope_parameters=spec | dict(partial_rotary_factor=one(0.25, 0.5, 1.0)),
    )
    if name == "Qwen3Next":
        count = int(rng.integers(2, 7))
        changes |= dict(
            num_experts=count, num_experts_per_tok=int(rng.integers(1, count + 1)),
            moe_intermediate_size=one(8, 16), shared_expert_intermediate_size=one(6, 18),
            norm_topk_prob=one(False, True),
        )  # fmt: skip
    return case(name, **changes)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed > 2 else ()) for seed in range(15)]
)
@pytest.mark.parametrize("draw", [held_out, held_out_kimi, held_out_lfm2])
def test_held_out_configurations_match_transformers(draw, seed, rng, tmp_path):
    folder = saved(randomised(draw(seed).create(), seed), tmp_path / "m")
    ids = tokens(rng, VOCAB, 2, 150)
    config, params = load_pretrained(folder)
    with torch.no_grad():
        want = reopened(folder, AUTO)(torch.tensor(ids).long()).logits
    assert_same_logits(apply(config, params)(ids)[0], want)
    if draw is held_out_lfm2:  # with conv_bias, transformers reads padding on the left
        read, ours, at = reader(config, params), init_cache(config, 2, 150), np.arange(150)
        for part in (slice(75), slice(75, 150)):
            got, ours = read(ids[:, part], ours, np.stack([at[part]] * 2))
            assert_same_logits(got, want[:, part])
    assert_round_trip(folder, tmp_path, AUTO, input_ids=torch.tensor(ids).long())
