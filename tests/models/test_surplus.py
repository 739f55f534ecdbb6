"""Tests of surplus parameters, which raise an error (flax would silently ignore them)."""

from dataclasses import replace
from functools import cache

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

import transformer_jax as tj

CONFIG = tj.ModelConfig(
    vocab_size=11, d_model=6, num_layers=1, num_heads=3, d_ff=7, max_len=13, positions="rope"
)
NORMED = replace(CONFIG, qk_norm=True, qk_norm_kind="layernorm")
CROSS = replace(CONFIG, kind="encoder-decoder")
ENCODER = replace(CONFIG, kind="encoder")
CELLS = tj.RecurrentConfig(vocab_size=11, d_embed=5, d_hidden=7)
WINDOW = tj.WindowConfig(vocab_size=11, context=2, d_embed=3, d_hidden=5)
TOKENS = np.zeros((1, 5), np.int32)


@cache
def names(config):
    shapes = jax.eval_shape(lambda: tj.init_params(config, jax.random.key(0)))
    return {"/".join(path): leaf for path, leaf in flatten_dict(shapes).items()}


MORE = {
    "use_bias": (replace(CONFIG, use_bias=False), CONFIG),
    "qkv_bias": (replace(CONFIG, qkv_bias=False), CONFIG),
    "ff_bias": (replace(CONFIG, ff_bias=False), CONFIG),
    "out_bias": (replace(CONFIG, out_bias=False), CONFIG),
    "activation": (CONFIG, replace(CONFIG, activation="xielu")),
    "glu": (CONFIG, replace(CONFIG, glu=True)),
    "d_ff": (replace(CONFIG, d_ff=0), CONFIG),
    "norm_order": (replace(CONFIG, norm_order="post"), CONFIG),
    "norm_order of a sandwich": (CONFIG, replace(CONFIG, norm_order="sandwich")),
    "norm_order of outputs": (
        replace(CONFIG, norm_order="output"), replace(CONFIG, norm_order="sandwich")
    ),
    "embedding_norm": (CONFIG, replace(CONFIG, embedding_norm=True)),
    "positions": (CONFIG, replace(CONFIG, positions="learned")),
    "positions of a bias": (CONFIG, replace(CONFIG, positions="t5")),
    "positions of distances": (CONFIG, replace(CONFIG, positions="shaw")),
    "tie_embeddings": (CONFIG, replace(CONFIG, tie_embeddings=False)),
    "logit_bias": (CONFIG, replace(CONFIG, logit_bias=True)),
    "qk_norm": (CONFIG, replace(CONFIG, qk_norm=True)),
    "qk_norm_bias": (NORMED, replace(NORMED, qk_norm_bias=True)),
    "attention_sinks": (CONFIG, replace(CONFIG, attention_sinks=True)),
    "attention_gate": (CONFIG, replace(CONFIG, attention_gate=True)),
    "type_vocab_size": (ENCODER, replace(ENCODER, type_vocab_size=2)),
    "num_classes": (replace(ENCODER, pooler="tanh"), replace(ENCODER, num_classes=3)),
    "pooler": (ENCODER, replace(ENCODER, pooler="tanh")),
    "masked_token_head": (ENCODER, replace(ENCODER, masked_token_head=True)),
    "kind": (CONFIG, CROSS),
    "source_vocab_size": (CROSS, replace(CROSS, source_vocab_size=7)),
    "num_layers": (CONFIG, replace(CONFIG, num_layers=2)),
    "num_layers of cells": (CELLS, replace(CELLS, num_layers=2)),
    "tie_embeddings of cells": (replace(CELLS, d_embed=7, tie_embeddings=True),
                                replace(CELLS, d_embed=7)),
    "direct": (WINDOW, replace(WINDOW, direct=True)),
    "num_layers of a window": (WINDOW, replace(WINDOW, num_layers=2)),
}  # fmt: skip


@pytest.mark.slow_except(
    "looped-qkv_bias", "looped-kind", "looped-num_layers*", "looped-num_classes",
    "scanned-use_bias",
)  # fmt: skip
@pytest.mark.parametrize("case", MORE)
@pytest.mark.parametrize("scanned", [False, True], ids=["looped", "scanned"])
def test_surplus_parameter_error_names_parameter_and_field(case, scanned):
    config, more = MORE[case]
    field = case.split()[0]
    if scanned:
        if not isinstance(config, tj.ModelConfig) or field == "num_layers":
            pytest.skip("not scanned, or of another shape")
        config, more = (replace(c, scan_layers=True) for c in (config, more))
    own, given = names(config), names(more)
    surplus = set(given) - set(own)
    assert surplus and not set(own) - set(given)
    model, tree = (
        tj.build(config),
        unflatten_dict({tuple(k.split("/")): v for k, v in given.items()}),
    )
    source = dict(source=TOKENS) if getattr(config, "kind", "") == "encoder-decoder" else {}
    with pytest.raises(ValueError, match=f"^parameters contain .*, but {field} is ") as error:
        jax.eval_shape(lambda p: model.apply({"params": p}, TOKENS, **source), tree)
    path = str(error.value).removeprefix("parameters contain ").split(",")[0]
    assert any(f"{name}/".startswith(f"{path}/") for name in surplus)
    assert not any(f"{name}/".startswith(f"{path}/") for name in own)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [replace(CONFIG, scan_layers=True), ENCODER, CELLS],
    ids=["scanned", "encoder", "cells"],
)
def test_unknown_parameter_raises_error_at_any_depth(config):
    """For example adapters that were not applied, or a tensor with another library's name."""
    own = {tuple(name.split("/")): leaf for name, leaf in names(config).items()}
    run = lambda p: tj.build(config).apply({"params": p}, TOKENS)  # noqa: E731
    jax.eval_shape(run, unflatten_dict(own))
    parents = {path[:n] for path in own for n in range(len(path)) if "cell_0" not in path[:n]}
    for parent in sorted(parents):
        added = {**own, (*parent, "a"): jax.ShapeDtypeStruct((1, 2), np.float32)}
        path = "/".join((*parent, "a"))
        with pytest.raises(
            ValueError, match=rf"^parameters contain {path}, which the config does not use"
        ):
            jax.eval_shape(run, unflatten_dict(added))


@pytest.mark.slow
def test_additional_layers_in_subclass_or_parent_module_are_allowed():
    class Own(tj.Decoder):
        def setup(self):
            super().setup()
            self.own = nn.Dense(3)

        def __call__(self, tokens):
            return self.own(super().__call__(tokens)[0])

    class Around(nn.Module):
        def setup(self):
            self.model, self.own = tj.build(CONFIG), nn.Dense(3)
            nn.share_scope(self, self.model)

        def __call__(self, tokens):
            return self.own(self.model(tokens)[0])

    for model in (Own(CONFIG), Around()):
        params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
        assert jax.eval_shape(model.apply, params, TOKENS).shape == (*TOKENS.shape, 3)
