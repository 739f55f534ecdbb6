"""A decoder-only transformer, GPT-2 or Llama, in one file of plain JAX.

Read it from top to bottom: config, parameters, cache, the parts of a block, the model, generation.
Every function is pure, arithmetic is in float32, and these letters give the shapes:

    B  batch             N  query heads            D  width of the model
    T  tokens read now   K  key and value heads    F  hidden width of the feed-forward
    S  slots of a cache  G  N / K                  V  vocabulary
    L  blocks            H  width of a head
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import Array


@dataclass(frozen=True)  # hashable, so it can be a static argument of jax.jit
class Config:  # the defaults are the smallest GPT-2 (Radford et al. 2019)
    vocab_size: int = 50257  # V
    d_model: int = 768  # D
    num_layers: int = 12  # L
    num_heads: int = 12  # N
    num_kv_heads: int = 12  # K; fewer than N: G query heads share one (Ainslie et al. 2023)
    d_ff: int = 3072  # F
    max_len: int = 1024  # tokens of the longest text
    rope_base: float | None = None  # rotary positions (Su et al. 2021); None: learned vectors
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = 1e-5
    swiglu: bool = False  # gated feed-forward (Shazeer 2020)
    use_bias: bool = True
    tie_embeddings: bool = True  # the embedding table is also the output matrix


def init_params(config: Config, key: Array) -> dict:
    """Draw tables and kernels from N(0, 0.02^2); scales are 1 and biases 0."""
    D, F, V, L = config.d_model, config.d_ff, config.vocab_size, config.num_layers
    N, K, H = config.num_heads, config.num_kv_heads, config.d_model // config.num_heads
    keys = iter(jax.random.split(key, 3 + 7 * L))  # 3 tables, and 7 kernels per block

    def table(*shape: int) -> Array:
        return 0.02 * jax.random.normal(next(keys), shape)

    def new_linear(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> dict:
        kernel = {"kernel": table(*inputs, *outputs)}
        return kernel | {"bias": jnp.zeros(outputs)} if config.use_bias else kernel

    def new_norm() -> dict:
        has_bias = config.use_bias and config.norm == "layernorm"
        return {"scale": jnp.ones(D)} | ({"bias": jnp.zeros(D)} if has_bias else {})

    embed, decoder = {"tokens": table(V, D)}, {"norm": new_norm()}
    if config.rope_base is None:
        embed["positions"] = table(config.max_len, D)
    if not config.tie_embeddings:
        embed["output"] = table(V, D)
    for i in range(L):
        block = {"norm_attention": new_norm(), "norm_feed_forward": new_norm()}
        q, k, v = (new_linear((D,), (heads, H)) for heads in (N, K, K))
        block["attention"] = {"query": q, "key": k, "value": v, "out": new_linear((N, H), (D,))}
        block["feed_forward"] = {"up": new_linear((D,), (F,)), "down": new_linear((F,), (D,))}
        if config.swiglu:
            block["feed_forward"]["gate"] = new_linear((D,), (F,))
        decoder[f"block_{i}"] = block
    return {"embed": embed, "decoder": decoder}


class Cache(NamedTuple):  # the tokens so far: slot s contains the token at position s
    layers: tuple[tuple[Array, Array], ...]  # keys and values of each block, [B, S, K, H] both
    length: Array  # i32[]: filled slots


def init_cache(config: Config, batch: int, capacity: int) -> Cache:
    """Return an empty cache of S = capacity slots."""
    empty = jnp.zeros((batch, capacity, config.num_kv_heads, config.d_model // config.num_heads))
    return Cache(((empty, empty),) * config.num_layers, jnp.array(0))


def linear(params: dict, equation: str, x: Array) -> Array:
    """Return x W (+ b); "BTD,DNH->BTNH" maps x from width D to N heads of width H."""
    y = jnp.einsum(equation, x, params["kernel"])
    return y + params["bias"][None, None] if "bias" in params else y


def norm(params: dict, config: Config, x: Array) -> Array:  # [B, T, D] -> [B, T, D]
    """Return (x - mean) / sqrt(var + eps) * scale (+ bias); RMSNorm has mean 0."""
    if config.norm == "layernorm":
        x = x - x.mean(axis=-1, keepdims=True)
    x = x * jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + config.norm_eps)
    x = x * params["scale"][None, None]
    return x + params["bias"][None, None] if "bias" in params else x


def rope(x: Array, positions: Array, base: float) -> Array:  # [B, T, N, H], i32[T]
    """Rotate pair i of a head, (x_i, x_{i + H/2}), by position * base^(-2i/H) radians."""
    i = jnp.arange(x.shape[-1] // 2)  # [H/2]
    angles = jnp.outer(positions, base ** (-i / len(i)))[None, :, None]  # [1, T, 1, H/2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    u, v = jnp.split(x, 2, axis=-1)  # [B, T, N, H/2] each
    return jnp.concatenate([u * cos - v * sin, v * cos + u * sin], axis=-1)


def attention(
    params: dict, config: Config, x: Array, positions: Array, cached: tuple[Array, Array]
) -> tuple[Array, tuple[Array, Array]]:  # x [B, T, D]; positions i32[T]; cached [B, S, K, H] each
    """Return softmax(q k^T / sqrt(H)) v of every head, joined by W_o (Vaswani et al. 2017)."""
    q = linear(params["query"], "BTD,DNH->BTNH", x)
    k = linear(params["key"], "BTD,DKH->BTKH", x)
    v = linear(params["value"], "BTD,DKH->BTKH", x)
    if config.rope_base is not None:  # before caching: a key keeps its position
        q, k = rope(q, positions, config.rope_base), rope(k, positions, config.rope_base)
    keys, values = cached
    keys, values = keys.at[:, positions].set(k), values.at[:, positions].set(v)
    # Causal: a query sees its own slot and earlier ones. Later slots have later tokens or none.
    visible = jnp.arange(keys.shape[1])[None] <= positions[:, None]  # bool[T, S]
    q = rearrange(q, "B T (K G) H -> B T K G H", K=config.num_kv_heads)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, keys) * q.shape[-1] ** -0.5  # variance 1
    weights = jax.nn.softmax(jnp.where(visible[None, None, None], scores, -jnp.inf), axis=-1)
    heads = jnp.einsum("BKGTS,BSKH->BTKGH", weights, values)
    heads = rearrange(heads, "B T K G H -> B T (K G) H")
    return linear(params["out"], "BTNH,NHD->BTD", heads), (keys, values)


def feed_forward(params: dict, config: Config, x: Array) -> Array:  # [B, T, D] -> [B, T, D]
    """Return gelu(x W_up) W_down, or with a gate (silu(x W_gate) * (x W_up)) W_down."""
    hidden = linear(params["up"], "BTD,DF->BTF", x)
    if config.swiglu:
        hidden = jax.nn.silu(linear(params["gate"], "BTD,DF->BTF", x)) * hidden
    else:
        hidden = jax.nn.gelu(hidden)  # the tanh form, as in GPT-2
    return linear(params["down"], "BTF,FD->BTD", hidden)


def forward(
    params: dict, config: Config, tokens: Array, cache: Cache | None = None
) -> tuple[Array, Cache]:  # i32[B, T] -> [B, T, V]
    """Return the logits of each next token and the cache extended by these tokens."""
    if cache is None:  # a whole text is one step of T tokens into an empty cache of T slots
        cache = init_cache(config, *tokens.shape)
    positions = cache.length + jnp.arange(tokens.shape[1])  # i32[T]
    # NaN if there is no such row or slot; plain table[id] would return the last row.
    x = jnp.take(params["embed"]["tokens"], tokens, axis=0).astype(jnp.float32)  # [B, T, D]
    x = jnp.where((positions < cache.layers[0][0].shape[1])[None, :, None], x, jnp.nan)
    if config.rope_base is None:
        x = x + jnp.take(params["embed"]["positions"], positions, axis=0)[None]
    layers = []
    for i, cached in enumerate(cache.layers):
        block = params["decoder"][f"block_{i}"]
        y = norm(block["norm_attention"], config, x)
        y, cached = attention(block["attention"], config, y, positions, cached)
        x = x + y
        y = norm(block["norm_feed_forward"], config, x)
        x = x + feed_forward(block["feed_forward"], config, y)
        layers.append(cached)
    x = norm(params["decoder"]["norm"], config, x)
    output = params["embed"]["tokens" if config.tie_embeddings else "output"]  # [V, D]
    return jnp.einsum("BTD,VD->BTV", x, output), Cache(tuple(layers), positions[-1] + 1)


def sample(key: Array, logits: Array, temperature: float, top_k: int | None) -> Array:
    """Draw from softmax(logits / temperature) over the k best: [B, V] -> i32[B]."""
    if temperature == 0:  # in the limit, the best token has probability 1
        return logits.argmax(axis=-1)
    if top_k is not None:
        worst = jax.lax.top_k(logits, top_k)[0][:, -1:]  # [B, 1]: the k-th best
        logits = jnp.where(logits < worst, -jnp.inf, logits)
    return jax.random.categorical(key, logits / temperature, axis=-1)


@jax.jit(static_argnames=("config", "num_tokens", "temperature", "top_k"))
def generate(
    params: dict, config: Config, prompt: Array, key: Array, num_tokens: int,
    temperature: float = 1.0, top_k: int | None = None,
) -> Array:  # i32[B, P] -> i32[B, num_tokens]  # fmt: skip
    """Continue each prompt: read it in one step, then one token at a time through the cache."""
    if (length := prompt.shape[1] + num_tokens) > config.max_len:
        raise ValueError(f"{length} tokens are more than max_len {config.max_len}")
    logits, cache = forward(params, config, prompt, init_cache(config, len(prompt), length))

    def step(carry: tuple[Array, Cache], key: Array) -> tuple[tuple[Array, Cache], Array]:
        logits, cache = carry  # last token, [B, V]
        token = sample(key, logits, temperature, top_k)
        logits, cache = forward(params, config, token[:, None], cache)
        return (logits[:, -1], cache), token

    _, tokens = jax.lax.scan(step, (logits[:, -1], cache), jax.random.split(key, num_tokens))
    return tokens.T


if __name__ == "__main__":  # greedy: generate through the cache, then read at once
    config = Config(vocab_size=97, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=64,
                    tie_embeddings=False)  # fmt: skip
    params = init_params(config, jax.random.key(0))
    prompt = jnp.array([[2, 3, 5, 7]])
    new = generate(params, config, prompt, jax.random.key(1), num_tokens=8, temperature=0.0)
    logits, _ = jax.jit(forward, static_argnums=1)(params, config, jnp.hstack([prompt, new]))
    print(new[0], "equal", logits[0, 3:-1].argmax(axis=-1))
