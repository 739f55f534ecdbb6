"""Behavior of libraries at the end of a cache or a position table, and with dropout.

Each probe runs a library on small inputs and returns a short description of what it observed. No
outcome is defined in advance. `BEHAVIOR` contains the questions and the probe of each library.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.peers import Absent

CAPACITY = 3
Probe = Callable[[], str]


def raised(error: Exception) -> str:
    return f"raises {type(error).__name__}"


# One more key than a cache has slots


def full_cache(write: Callable[[float], np.ndarray]) -> str:
    """Write one more key than a cache has slots, and compare the cache's content before and after.

    Args:
        write: function that appends a key and returns one number per slot. The key is proportional
            to the argument.
    """
    for number in range(1, CAPACITY + 1):
        before = write(float(number))
    try:
        after = write(CAPACITY + 1.0)
    except Exception as error:
        return raised(error)
    if len(after) > len(before):
        return "grows"
    changed = np.flatnonzero(before != after).tolist()
    if not changed:
        return "does not store the key"
    if np.isnan(after).any():
        return "NaN"
    names = {(0,): "overwrites the oldest key", (CAPACITY - 1,): "overwrites the newest key"}
    return names.get(tuple(changed), f"changes slots {changed}")


def _our_model() -> tuple[Any, Any, Any]:
    import jax

    import transformer_jax as tj

    config = tj.preset(
        "gpt2", num_layers=1, d_model=8, num_heads=1, vocab_size=11, max_len=CAPACITY + 2
    )
    return config, tj.build(config), tj.init_params(config, jax.random.key(0))


def our_cache(jit: bool) -> str:
    import jax
    import jax.numpy as jnp

    import transformer_jax as tj

    config, model, params = _our_model()
    step: Any = tj.make_step(model)
    step = jax.jit(step) if jit else step
    state = tj.init_cache(config, batch=1, capacity=CAPACITY)
    logits = jnp.zeros(())

    def write(number: float) -> np.ndarray:
        nonlocal state, logits
        logits, state = step(params, jnp.full((1, 1), int(number)), state)
        # a user of a compiled step sees NaN logits
        bad = bool(jnp.isnan(logits).any())
        return np.full(CAPACITY, np.nan if bad else float(number))

    return full_cache(write)


def linen_cache() -> str:
    import jax
    import jax.numpy as jnp
    from flax import linen

    layer = linen.MultiHeadDotProductAttention(num_heads=1, qkv_features=4, decode=True)
    variables = layer.init(jax.random.key(0), jnp.ones((1, CAPACITY, 4)))
    params, cache = variables["params"], jax.tree.map(jnp.zeros_like, variables["cache"])

    def write(number: float) -> np.ndarray:
        nonlocal cache
        both = {"params": params, "cache": cache}
        _, updated = layer.apply(both, jnp.full((1, 1, 4), number), mutable=["cache"])
        cache = updated["cache"]
        return np.asarray(cache["cached_key"][0, :, 0, 0])

    return full_cache(write)


def nnx_cache() -> str:
    import jax.numpy as jnp
    from flax import nnx

    layer = nnx.MultiHeadAttention(num_heads=1, in_features=4, decode=True, rngs=nnx.Rngs(0))
    layer.init_cache((1, CAPACITY, 4))

    def write(number: float) -> np.ndarray:
        layer(jnp.full((1, 1, 4), number))
        return np.asarray(layer.cached_key[0, :, 0, 0])

    return full_cache(write)


def transformers_cache(name: str) -> str:
    import torch
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, hidden_size=4
    )
    cache: Any = (
        transformers.DynamicCache()
        if name == "DynamicCache"
        else transformers.StaticCache(config, max_cache_len=CAPACITY)
    )

    def write(number: float) -> np.ndarray:
        key = torch.full((1, 1, 1, 4), number)
        cache.update(key, key, 0)
        return cache.layers[0].keys[0, 0, :, 0].clone().numpy()

    return full_cache(write)


# A position past the end of a table of learned positional embeddings


def past_table(table: np.ndarray, row: np.ndarray) -> str:
    """Describe the row that was looked up past the end of a table."""
    if np.isnan(row).all():
        return "NaN"
    for name, same in {"the last row": table[-1], "the first row": table[0]}.items():
        if np.array_equal(row, same):
            return name
    return "zeros" if not row.any() else "another row"


def our_positions() -> str:
    import jax.numpy as jnp

    config, model, params = _our_model()
    try:
        model.apply({"params": params}, jnp.zeros((1, config.max_len + 1), int))
    except Exception as error:
        return raised(error)
    return "computes"


def linen_table() -> str:
    import jax
    import jax.numpy as jnp
    from flax import linen

    layer = linen.Embed(4, 2)
    variables = layer.init(jax.random.key(0), jnp.arange(4))
    table = np.asarray(variables["params"]["embedding"])
    return past_table(table, np.asarray(layer.apply(variables, jnp.array([4])))[0])


def nnx_table() -> str:
    import jax.numpy as jnp
    from flax import nnx

    layer = nnx.Embed(4, 2, rngs=nnx.Rngs(0))
    table = np.asarray(layer(jnp.arange(4)))
    return past_table(table, np.asarray(layer(jnp.array([4])))[0])


def keras_table() -> str:
    import keras

    layer = keras.layers.Embedding(4, 2)
    table = np.asarray(layer(np.arange(4)))
    return past_table(table, np.asarray(layer(np.array([4])))[0])


def torch_table() -> str:
    import torch

    layer = torch.nn.Embedding(4, 2)
    try:
        row = layer(torch.tensor([4]))[0]
    except Exception as error:
        return raised(error)
    return past_table(layer.weight.detach().numpy(), row.detach().numpy())


# Dropout on attention weights

SHAPE = (4, 8, 16, 3)  # B, T, S, N
RATE = 0.5


def dropped(out: np.ndarray) -> str:
    """Describe dropout, based on outputs [B, T, N, S].

    Scores are equal, and the value of key s is the unit vector s, so the output equals the weights.
    """
    kept, largest = out > 0, out.max() * SHAPE[2]
    factors = {1 / (1 - RATE): "divided by 1 - rate", 1.0: "not rescaled"}
    scale = next(
        (text for factor, text in factors.items() if np.isclose(largest, factor)),
        f"multiplied by {largest:.3g}",
    )
    shared = [
        name
        for name, first in (("rows", kept[:1]), ("heads", kept[:, :, :1]))
        if (kept == first).all()
    ]
    each = f"shared by {' and '.join(shared)}" if shared else "each weight by itself"
    return f"{each}; kept weights are {scale}"


def _uniform() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    B, T, S, N = SHAPE
    value = np.broadcast_to(np.eye(S, dtype=np.float32)[None, :, None], (B, S, N, S))
    return np.zeros((B, T, N, 4), np.float32), np.zeros((B, S, N, 4), np.float32), value.copy()


def our_dropout(name: str | None) -> str:
    import jax

    from transformer_jax import dot_product_attention

    out = dot_product_attention(
        *_uniform(), dropout_rate=RATE, dropout_key=jax.random.key(0), implementation=name
    )
    return dropped(np.asarray(out))


def flax_dropout(library: str) -> str:
    import jax

    attend = importlib.import_module(f"flax.{library}").dot_product_attention
    key = jax.random.key(0)
    out = attend(*_uniform(), dropout_rate=RATE, dropout_rng=key, deterministic=False)
    return dropped(np.asarray(out))


def torch_dropout() -> str:
    import torch

    torch.manual_seed(0)
    q, k, v = (torch.tensor(x).transpose(1, 2) for x in _uniform())
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=RATE)
    return dropped(out.transpose(1, 2).numpy())


def x_transformers_dropout() -> str:
    import torch
    from x_transformers.attend import Attend

    torch.manual_seed(0)
    q, k, v = (torch.tensor(x).transpose(1, 2) for x in _uniform())
    out, _ = Attend(dropout=RATE).train()(q, k, v)
    return dropped(out.transpose(1, 2).numpy())


# A batch of prompts with different lengths, then one token


def ragged(step_of_rows: Callable[[list[list[int]]], np.ndarray]) -> str:
    """Compare a batch of two prompts with each prompt by itself.

    Args:
        step_of_rows: function that pads prompts as the library requires, and returns the logits
            after each prompt.
    """
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8]]
    both = step_of_rows(prompts)
    alone = np.concatenate([step_of_rows([prompt]) for prompt in prompts])
    off = np.abs(both - alone).max() / np.abs(alone).max()
    return "equal to each prompt alone" if off < 1e-5 else f"differs by {off:.1g} of the largest"


def our_ragged() -> str:
    import jax
    import jax.numpy as jnp

    import transformer_jax as tj

    config = tj.preset("gpt2", num_layers=2, d_model=8, num_heads=2, vocab_size=11, max_len=16)
    model, params = tj.build(config), tj.init_params(config, jax.random.key(0))
    step: Any = tj.make_step(model)

    def logits(prompts: list[list[int]]) -> np.ndarray:
        size = max(map(len, prompts))
        tokens = jnp.array([prompt + [0] * (size - len(prompt)) for prompt in prompts])
        valid = jnp.array([[at < len(prompt) for at in range(size)] for prompt in prompts])
        state = tj.init_cache(config, batch=len(prompts), capacity=16)
        _, state = step(params, tokens, state, valid=valid)
        out, _ = step(params, jnp.full((len(prompts), 1), 9), state)
        return np.asarray(out[:, -1])

    return ragged(logits)


def transformers_ragged(side: str) -> str:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=16, n_embd=8, n_layer=2, n_head=2, attn_pdrop=0.0
    )
    model: Any = transformers.GPT2LMHeadModel(config).eval()

    def logits(prompts: list[list[int]]) -> np.ndarray:
        size = max(map(len, prompts))
        pads = [[0] * (size - len(prompt)) for prompt in prompts]
        ones = [[1] * len(prompt) for prompt in prompts]
        left = side == "left"
        tokens = [p + x if left else x + p for x, p in zip(prompts, pads, strict=True)]
        mask = [p + x if left else x + p for x, p in zip(ones, pads, strict=True)]
        with torch.no_grad():
            first = model(torch.tensor(tokens), attention_mask=torch.tensor(mask), use_cache=True)
            grown = torch.tensor([[*row, 1] for row in mask])
            out = model(
                torch.full((len(prompts), 1), 9), attention_mask=grown,
                past_key_values=first.past_key_values,
            )  # fmt: skip
        return out.logits[:, -1].numpy()

    return ragged(logits)


BEHAVIOR: dict[str, dict[str, Probe]] = {
    "one key more than a cache has slots": {
        "transformer_jax": lambda: our_cache(jit=False),
        "transformer_jax, inside jit": lambda: our_cache(jit=True),
        "flax.linen MultiHeadDotProductAttention": linen_cache,
        "flax.nnx MultiHeadAttention": nnx_cache,
        "transformers StaticCache": lambda: transformers_cache("StaticCache"),
        "transformers DynamicCache": lambda: transformers_cache("DynamicCache"),
    },
    "a position past the table of learned positions": {
        "transformer_jax": our_positions,
        "flax.linen Embed": linen_table,
        "flax.nnx Embed": nnx_table,
        "keras Embedding (JAX)": keras_table,
        "torch Embedding": torch_table,
    },
    "dropout of attention weights": {
        "transformer_jax xla": lambda: our_dropout("xla"),
        "transformer_jax blockwise": lambda: our_dropout("blockwise"),
        "transformer_jax native": lambda: our_dropout("native"),
        "flax.linen": lambda: flax_dropout("linen"),
        "flax.nnx": lambda: flax_dropout("nnx"),
        "torch SDPA": torch_dropout,
        "x-transformers": x_transformers_dropout,
    },
    "a batch of prompts of two lengths, then one token, without position IDs": {
        "transformer_jax": our_ragged,
        "transformers GPT-2, padded on the left": lambda: transformers_ragged("left"),
        "transformers GPT-2, padded on the right": lambda: transformers_ragged("right"),
    },
}
"""Probes, keyed by question and library."""


PACKAGES = ("flax", "jax", "keras", "torch", "transformers", "x-transformers")


def versions() -> dict[str, str]:
    """Return the version of each installed package that a probe uses."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def observed() -> dict[str, dict[str, str]]:
    """Return the observation of each probe, or "not run: ..." if its library is missing."""
    found: dict[str, dict[str, str]] = {}
    for question, probes in BEHAVIOR.items():
        found[question] = {}
        for library, probe in probes.items():
            try:
                found[question][library] = probe()
            except (ImportError, Absent) as reason:
                found[question][library] = f"not run: {reason}"
    return found


def markdown(found: dict[str, dict[str, str]]) -> str:
    """Return one table per question, and the versions of the libraries."""
    parts = [", ".join(f"{name} {version}" for name, version in versions().items())]
    for question, rows in found.items():
        lines = [f"| {question} | observed |", "|---|---|"]
        parts.append("\n".join([*lines, *(f"| {name} | {text} |" for name, text in rows.items())]))
    return "\n\n".join(parts)
