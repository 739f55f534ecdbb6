"""Tiny models shaped like GPT-2 and Llama, with no bias of 0 and no norm scale of 1."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax
import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.models.factory import build, init_params
from transformer_jax.models.stack import stack_layers

VOCAB, B, T, L, N, D = 31, 2, 7, 2, 4, 14
GPT2 = ModelConfig(
    vocab_size=VOCAB, d_model=D, num_layers=L, num_heads=N, head_dim=6, d_ff=11, max_len=17,
    init_std=0.3,
)  # fmt: skip
LLAMA = dataclasses.replace(
    GPT2, num_kv_heads=2, positions="rope", norm="rmsnorm", activation="silu", glu=True,
    use_bias=False, tie_embeddings=False,
)  # fmt: skip
SHAPES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "gemma": dataclasses.replace(LLAMA, norm_unit_offset=True, scale_embeddings=True),
    "t5": dataclasses.replace(
        LLAMA, kind="encoder-decoder", positions="t5", logit_scale=0.7, logit_bias=True
    ),
    "neox": dataclasses.replace(GPT2, norm_order="parallel", positions="rope"),
    "gptj": dataclasses.replace(
        LLAMA,
        norm="layernorm",
        norm_order="parallel_shared",
        glu=False,
        use_bias=True,
        qkv_bias=False,
        out_bias=False,
        logit_bias=True,
    ),
    "encoder": dataclasses.replace(GPT2, kind="encoder", logit_bias=True),
    "attention alone": dataclasses.replace(GPT2, d_ff=0),
    "no norm": dataclasses.replace(GPT2, norm=None),
    "post": dataclasses.replace(GPT2, norm_order="post"),
    "bert": dataclasses.replace(
        GPT2, kind="encoder", norm_order="post", masked_token_head=True, logit_bias=True
    ),
    "sandwich": dataclasses.replace(LLAMA, norm_order="sandwich", logit_softcap=5.0),
}


@cache
def params_of(shape: str) -> Any:
    """Draw parameters with NumPy, without compiling a program."""
    config, rng = SHAPES[shape], np.random.default_rng(5)

    def leaf(path: tuple[Any, ...], x: jax.ShapeDtypeStruct) -> np.ndarray:
        name, noise = path[-1].key, rng.standard_normal(x.shape)
        if name == "scale":
            noise = 0.2 * noise + (not config.norm_unit_offset)
        else:
            noise *= 0.2 if name == "bias" else 0.36
        return noise.astype(np.float32)

    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(3)))
    return jax.tree_util.tree_map_with_path(leaf, shapes)


@cache
def stacked_params_of(shape: str) -> Any:
    return jax.device_get(jax.jit(stack_layers)(params_of(shape)))


def model_of(shape: str, *, scanned: bool = False) -> tuple[Any, Any]:
    """Return a model and its parameters."""
    config = dataclasses.replace(SHAPES[shape], scan_layers=scanned)
    return build(config), stacked_params_of(shape) if scanned else params_of(shape)


def draw(seed: int = 17, rows: int = B) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (rows, T), dtype=np.int32)


def more(shape: str) -> dict[str, np.ndarray]:
    """Return the additional arguments of the model."""
    source = np.random.default_rng(5).integers(0, VOCAB, (B, 5), dtype=np.int32)
    return {"source": source} if SHAPES[shape].kind == "encoder-decoder" else {}
