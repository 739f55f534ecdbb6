"""Latent attention as a layer against NumPy float64, and with every feature of a model.

The layers of the config differ: latent attention, attention with grouped queries, a state.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.extend.core import jaxprs_in_params

from tests.support.mixers import (
    ERROR,
    LEFT,
    LENGTHS,
    RIGHT,
    ROWS,
    TOKENS,
    VOCAB,
    T,
    logits_of,
    read,
)
from tests.support.tolerances import FORWARD_F32, GRADIENT_F32, assert_near
from transformer_jax import (
    LoraConfig,
    Window,
    beam_search,
    build,
    cache_bytes,
    export_decoder,
    fork,
    generate,
    init_cache,
    init_paged_cache,
    init_params,
    make_step,
    num_params,
    places,
    rewind_cache,
    speculate,
)
from transformer_jax.attention.masks import Causal, Padding, Prefix
from transformer_jax.config import (
    Alibi,
    ConfigError,
    GatedDelta,
    LatentAttention,
    ModelConfig,
    Rope,
    Shaw,
)
from transformer_jax.decoding.continuous_batching import Batcher, Request, serve_requests
from transformer_jax.decoding.proposers import PromptLookup
from transformer_jax.decoding.slots import init_slots
from transformer_jax.interpret import circuits, logit_attribution
from transformer_jax.models.attention_weights import attention_weights
from transformer_jax.models.flops import forward_flops, training_flops
from transformer_jax.models.latent_attention import MultiHeadLatentAttention
from transformer_jax.models.lora import apply_lora, init_lora, with_adapters
from transformer_jax.models.quantized import quantize
from transformer_jax.models.streaming import StreamingEncoder, rebase_cache
from transformer_jax.text import inspect_programs
from transformer_jax.training.placement import parameter_spec

pytestmark = pytest.mark.usefixtures("quick_compilation")

N, H, R, C, HV, QUERY = 3, 5, 4, 13, 7, 11
D, F = 24, 38
SIZES = LatentAttention(query_rank=QUERY, kv_rank=C, nope_dim=H, rope_dim=R, value_dim=HV)
CONFIG = ModelConfig(
    vocab_size=VOCAB, d_model=D, num_layers=2, num_heads=N, d_ff=F, max_len=64,
    positions=Rope(pairing="interleaved"), norm="rmsnorm", use_bias=False, init_std=0.2,
    mixers=("latent_attention",), latent_attention=SIZES,
)  # fmt: skip
MIXED = replace(
    CONFIG, num_layers=3, num_kv_heads=1, mixers=("latent_attention", "attention", "gated_delta"),
    gated_delta=GatedDelta(num_key_heads=1, num_value_heads=2, key_dim=3, value_dim=5),
    norm_eps=0.01,
)  # fmt: skip
ONE = replace(CONFIG, num_layers=1)
EPS = 1e-6
"""Epsilon of the norms of latents, whatever `norm_eps` is."""


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, jax.random.key(7))


# Arithmetic


FREQUENCIES = 10_000.0 ** (-np.arange(0, R, 2) / R)


def rotate(x, positions, frequencies):  # [..., R], one position for each leading index
    angles = positions[..., None] * frequencies
    u, v = x[..., 0::2], x[..., 1::2]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.stack([u * cos - v * sin, v * cos + u * sin], axis=-1).reshape(x.shape)


def reference(params, x, positions, window, query_rank, scale, frequencies=FREQUENCIES):
    """Compute the layer query by query in float64, from the equations of its docstring."""
    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    normed = lambda y, s: y / np.sqrt((y * y).mean(axis=-1, keepdims=True) + EPS) * s  # noqa: E731
    out = np.zeros(x.shape)
    for b in range(len(x)):
        real = np.flatnonzero(positions[b] >= 0)
        for t in real:
            at = positions[b, t]
            y = x[b, t]
            if query_rank:
                y = normed(y @ w["query_latent"]["kernel"], w["query_latent_scale"])
            q = np.einsum("d,dnh->nh", y, w["query"]["kernel"])
            q[:, H:] = rotate(q[:, H:], np.full(N, at), frequencies)
            seen = [s for s in real if at - window < positions[b, s] <= at]
            c = normed(x[b, seen] @ w["latent"]["kernel"], w["latent_scale"])
            r = rotate(x[b, seen] @ w["rotated_key"]["kernel"], positions[b, seen], frequencies)
            k = np.einsum("sc,cnh->snh", c, w["key"]["kernel"])
            scores = np.einsum("nh,snh->ns", q[:, :H], k) + q[:, H:] @ r.T
            p = np.exp(scale * (scores - scores.max(axis=1, keepdims=True)))
            p /= p.sum(axis=1, keepdims=True)
            v = np.einsum("sc,cnv->snv", c, w["value"]["kernel"])
            heads = np.einsum("ns,snv->nv", p, v)
            out[b, t] = np.einsum("nv,nvd->d", heads, w["out"]["kernel"])
    return out


@pytest.mark.parametrize("query_rank", [None, QUERY])
@pytest.mark.parametrize(("positions", "window"), [(LEFT, T), (RIGHT, 5)], ids=["left", "window"])
def test_layer_equals_float64(rng, positions, window, query_rank):
    config = replace(ONE, window=window, latent_attention=replace(SIZES, query_rank=query_rank))
    layer, x = MultiHeadLatentAttention(config), rng.normal(size=(ROWS, T, D)).astype(np.float32)
    at = dict(positions=jnp.asarray(positions), token_positions=jnp.asarray(positions))
    mask = Causal() if window == T else Causal() & Window(window)
    params = layer.init({"params": jax.random.key(1)}, x, mask=mask, **at)["params"]
    params["latent_scale"] = jnp.asarray(rng.normal(size=C).astype(np.float32))
    got, _ = layer.apply({"params": params}, x, mask=mask, **at)
    want = reference(params, x, positions, window, query_rank, (H + R) ** -0.5)
    assert_near(np.asarray(got)[positions >= 0], want[positions >= 0], 5 * FORWARD_F32)


@pytest.mark.slow
def test_scale_of_scores_and_of_rotation_follow_yarn(rng):
    rope = Rope(
        pairing="interleaved", scaling="yarn", factor=4.0, original_len=16, attention_factor=1.3
    )  # fmt: skip
    x = rng.normal(size=(1, T, D)).astype(np.float32)
    at = jnp.arange(T)[None]
    call = dict(positions=at, token_positions=at, mask=Causal())
    config = replace(ONE, positions=rope, attention_scale=0.4)
    params = MultiHeadLatentAttention(config).init({"params": jax.random.key(1)}, x, **call)
    got, _ = MultiHeadLatentAttention(config).apply(params, x, **call)
    # the factor divides all frequencies but the first
    w = dict(params["params"])
    for name in ("query", "rotated_key"):
        kernel = np.array(w[name]["kernel"])
        kernel[..., -R:] *= 1.3
        w[name] = dict(kernel=kernel)
    want = reference(w, x, np.arange(T)[None], T, QUERY, 0.4, FREQUENCIES / [1, 4])
    assert_near(got, want, 5 * FORWARD_F32)


@pytest.mark.slow
def test_gradients_of_all_parameters_are_finite_and_not_zero(params):
    def loss(params):
        logits = build(CONFIG).apply({"params": params}, TOKENS, positions=jnp.asarray(RIGHT))[0]
        return jnp.where(jnp.asarray(RIGHT >= 0)[..., None], logits, 0).std()

    grads = jax.jit(jax.grad(loss))(params)
    for path, leaf in jax.tree_util.tree_flatten_with_path(grads)[0]:
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0, path


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["attention", "dots", "full"])
def test_recomputation_does_not_change_gradients(params, remat):
    def gradient(config):
        loss = lambda p: logits_of(config, p, TOKENS).std()  # noqa: E731
        return jax.grad(loss)(params)["decoder"]

    want, got = gradient(CONFIG), gradient(replace(CONFIG, remat=remat))
    jax.tree.map(lambda x, y: assert_near(x, y, GRADIENT_F32), got, want)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "blockwise", "native"])
def test_implementations_agree_with_and_without_a_cache(params, implementation):
    want = logits_of(replace(CONFIG, window=7), params, TOKENS)
    config = replace(CONFIG, window=7, implementation=implementation)
    assert_near(logits_of(config, params, TOKENS), want, ERROR)
    cache = init_cache(config, ROWS, T)
    _, cache = read(config, params, TOKENS[:, :11], cache)
    assert_near(read(config, params, TOKENS[:, 11:], cache)[0], want[:, 11:], ERROR)


def test_implementations_that_cannot_run_are_refused_by_name(params):
    for name, rule in (("cudnn", "cudnn"), ("pallas", "pallas")):
        with pytest.raises(NotImplementedError, match=rule):
            build(replace(CONFIG, implementation=name)).apply({"params": params}, TOKENS)


# Padding and documents


@pytest.mark.slow
@pytest.mark.parametrize("positions", [LEFT, RIGHT], ids=["left", "right"])
@pytest.mark.parametrize("config", [CONFIG, MIXED], ids=["latents", "mixed"])
def test_padding_changes_no_logits(config, positions):
    params = init_params(config, jax.random.key(7))
    got = np.asarray(logits_of(config, params, TOKENS, positions=jnp.asarray(positions)))
    for row, at in enumerate(positions):
        real = TOKENS[row, at >= 0]
        alone = logits_of(config, params, np.pad(real, (0, T - len(real)))[None])
        assert_near(got[row, at >= 0], alone[0, : len(real)], ERROR)


@pytest.mark.slow
def test_packed_documents_equal_separate_rows():
    params = init_params(MIXED, jax.random.key(7))
    starts = (0, 4, 5, 13, T)
    segments = np.repeat(np.arange(4), np.diff(starts))[None].repeat(ROWS, axis=0)
    got = np.asarray(logits_of(MIXED, params, TOKENS, segments=segments))
    for start, end in pairwise(starts):
        alone = np.pad(TOKENS[:, start:end], ((0, 0), (0, T - end + start)))
        assert_near(
            got[:, start:end], logits_of(MIXED, params, alone)[:, : end - start], ERROR
        )  # fmt: skip


# The cache


@pytest.mark.slow_except("5-latents")
@pytest.mark.parametrize("config", [CONFIG, MIXED], ids=["latents", "mixed"])
@pytest.mark.parametrize("chunk", [1, 5, T])
def test_cached_logits_equal_full_pass(config, chunk):
    params = init_params(config, jax.random.key(7))
    want, cache = logits_of(config, params, TOKENS), init_cache(config, ROWS, T)
    got = []
    for start in range(0, T, chunk):
        logits, cache = read(config, params, TOKENS[:, start : start + chunk], cache)
        got.append(logits)
    assert_near(np.concatenate(got, axis=1), want, ERROR)
    assert cache.length.tolist() == [T] * ROWS


def test_cache_contains_latents_and_rotated_keys():
    cache = init_cache(CONFIG, 2, 29)
    assert cache.layers[0].k.shape == (2, 29, 1, C) and cache.layers[0].v.shape == (2, 29, 1, R)
    assert cache_bytes(CONFIG, 1, 29) == 2 * (29 * 4 * (C + R + 1) + 4)
    small = init_cache(replace(CONFIG, dtype="bfloat16"), 2, 29)
    assert {layer.k.dtype for layer in small.layers} == {jnp.dtype("bfloat16")}


def shapes_in(jaxpr):
    for equation in jaxpr.eqns:
        yield from (getattr(out.aval, "shape", ()) for out in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from shapes_in(inner)


def test_decoding_computes_no_keys_of_cached_tokens(params):
    """A prompt needs the keys and values of each head [B, S, N, ...], and a new token does not."""
    S, model = 523, build(replace(CONFIG, implementation="xla"))
    call = lambda tokens: jax.make_jaxpr(  # noqa: E731
        lambda cache: model.apply({"params": params}, tokens, cache=cache)[0]
    )(init_cache(CONFIG, 1, S))
    one = lambda tokens: {x[:3] for x in shapes_in(call(tokens).jaxpr) if len(x) == 4}  # noqa: E731
    assert (1, S, N) not in one(TOKENS[:1, :1])
    assert (1, S, N) in one(np.zeros((1, S), np.int32))


@pytest.mark.slow
def test_paged_and_int8_caches_equal_the_plain_one(params):
    want = logits_of(CONFIG, params, TOKENS)
    cache = init_paged_cache(CONFIG, ROWS, 20, num_pages=16, page_size=4)
    got = []
    for part in np.split(TOKENS, [7, 8, 15], axis=1):
        logits, cache = read(CONFIG, params, part, cache)
        got.append(logits)
    assert_near(np.concatenate(got, axis=1), want, ERROR)
    cache = init_cache(CONFIG, ROWS, T, dtype=jnp.int8)
    _, cache = read(CONFIG, params, TOKENS[:, :11], cache)
    found = read(CONFIG, params, TOKENS[:, 11:], cache)[0]
    assert cache.layers[0].k.dtype == jnp.int8
    assert_near(found, want[:, 11:], 0.02)
    assert np.abs(found - want[:, 11:]).max() > 1e-4


@pytest.mark.slow
def test_rings_rewind_and_fork(params):
    config = replace(CONFIG, window=5, sink_tokens=2)
    want = logits_of(config, params, TOKENS)
    cache = init_cache(config, ROWS, 5 + 2 + 3)
    _, cache = read(config, params, TOKENS[:, :12], cache)
    twice = rewind_cache(fork(cache, 2), jnp.array([10, 3] * ROWS))
    assert twice.length.tolist() == [10, 3] * ROWS
    cache = rewind_cache(cache, jnp.array([10, 9, 12]))
    for row, start in enumerate((10, 9, 12)):
        one = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], cache)
        got, _ = read(config, params, TOKENS[row : row + 1, start:], one)
        assert_near(got, want[row : row + 1, start:], ERROR)


@pytest.mark.slow
def test_beams_speculation_and_slots_equal_plain_decoding(params):
    step, prompt = make_step(build(CONFIG)), TOKENS[:, :6]
    empty = partial(init_cache, CONFIG, capacity=2 * T)
    want = generate(step, params, prompt, empty(ROWS), num_tokens=9).tokens
    got = speculate(
        step, params, prompt, empty(ROWS), proposer=PromptLookup(), num_tokens=9, num_draft=3
    )
    assert np.array_equal(got.tokens, want)
    one = beam_search(step, params, prompt, empty(ROWS), num_tokens=9, num_beams=1)
    assert np.array_equal(one.tokens[:, 0], want)
    beams = beam_search(step, params, prompt, empty(ROWS), num_tokens=4, num_beams=3)
    for row in range(ROWS):
        for new, score in zip(np.asarray(beams.tokens[row]), beams.scores[row], strict=True):
            text = np.concatenate([prompt[row], new])[None]
            log_p = jax.nn.log_softmax(logits_of(CONFIG, params, text)[0, 5:9], axis=-1)
            assert_near(score, np.take_along_axis(log_p, new[:, None], axis=1).sum(), 1e-5)
    requests = [Request(TOKENS[i % ROWS, : 3 + i], 4 + i, id=i) for i in range(5)]
    served = [*serve_requests(step, params, requests, empty(1), slots=2, capacity=2 * T)]
    slots = init_slots(step, params, empty(1), 2, 2 * T)
    sharing = Batcher(slots, params, iter(requests), empty(1), stream=False, shares=True)
    served += list(sharing)
    assert len(served) == 10
    for answer in served:
        request = requests[answer.id]
        alone = generate(
            step, params, request.prompt[None], empty(1), num_tokens=request.num_tokens
        )
        assert answer.error is None and answer.tokens.tolist() == alone.tokens[0].tolist()


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(latent_attention=None), "latent_attention is None: must be set, because mixers"),
        (dict(mixers=None), "latent_attention is .*: needs latent_attention in mixers"),
        (dict(num_kv_heads=1), "num_kv_heads is 1: needs attention in a layer"),
        (dict(qk_norm=True), "qk_norm is True: needs attention in a layer"),
        (dict(head_dim=8), "head_dim is 8: needs attention in a layer"),
        (dict(positions=Shaw()), "positions is .*: latent_attention layers do not support these"),
        (dict(positions=Rope(dims=2)), "positions.dims is 2: needs attention in mixers"),
        (
            dict(latent_attention=replace(SIZES, rope_dim=5)),
            "latent_attention.rope_dim is 5: must be even for positions rope",
        ),
        (dict(invariant=True), "cannot be promised for latent_attention layers"),
        (dict(scan_layers=True), "mixers is .*: a pattern needs a looped stack"),
    ],
)
def test_invalid_configs_are_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **changes)


def test_width_of_heads_does_not_depend_on_the_width_of_the_stream():
    assert replace(CONFIG, num_heads=5).num_heads == 5  # does not divide d_model
    assert replace(CONFIG, positions=Alibi()).positions == Alibi()


def test_tools_that_need_attention_name_the_reason(params):
    model = build(CONFIG)
    with pytest.raises(ValueError, match="circuits need attention"):
        circuits(model, params, "qk")
    with pytest.raises(ValueError, match="every layer must have attention"):
        logit_attribution(model, params, TOKENS, 3)
    with pytest.raises(ConfigError, match="every layer must have attention to be"):
        inspect_programs.branches(CONFIG)
    with pytest.raises(ValueError, match="a StreamingEncoder needs attention"):
        StreamingEncoder(replace(CONFIG, window=5), frame_dim=3)
    config = replace(CONFIG, window=5)
    with pytest.raises(ValueError, match="rebase_cache needs attention in every layer"):
        rebase_cache(init_cache(config, 1, 5), config)


# Other features of a model


@pytest.mark.slow
def test_masks_of_a_prefix_and_of_padding(params):
    """A token of the prefix sees the whole prefix, which a cache reads in one call."""
    mask = (Causal() | Prefix(jnp.array([4, 6, 2]))) & Padding(jnp.ones((ROWS, T), bool))
    want = logits_of(CONFIG, params, TOKENS, mask=mask)
    causal = logits_of(CONFIG, params, TOKENS)
    assert np.abs(want - causal).max() > 1e-2
    mask = Causal() | Prefix(jnp.array([4, 6, 2]))
    model, cache = build(CONFIG), init_cache(CONFIG, ROWS, T)
    got, cache = model.apply({"params": params}, TOKENS[:, :6], cache=cache, mask=mask)
    assert_near(got, want[:, :6], ERROR)


@pytest.mark.slow
def test_captures_are_the_values_that_edits_replace(params):
    model = build(CONFIG)
    names = [n for n in places(CONFIG) if n.startswith("block_1/latent_attention")]
    want, _, found = model.apply({"params": params}, TOKENS, capture=names)
    assert len(names) == 8
    sizes = dict(B=ROWS, T=T, S=T)
    for name in names:
        assert found[name].shape == tuple(sizes.get(size, size) for size in places(CONFIG)[name])
        if name.endswith("key_positions"):
            assert found[name].tolist() == [list(range(T))] * ROWS
            continue
        same = model.edited({name: lambda x, name=name: found[name]})
        assert_near(same.apply({"params": params}, TOKENS)[0], want, ERROR)
        changed = model.edited({name: lambda x: 0.5 * x}).apply({"params": params}, TOKENS)[0]
        assert np.abs(changed - want).max() > 1e-4, name
    weights = attention_weights(model, params, TOKENS)["latent_attention"]
    assert weights.shape == (ROWS, 2, N, T, T)
    assert_near(weights.sum(axis=-1), np.ones((ROWS, 2, N, T)), FORWARD_F32)


@pytest.mark.slow
def test_edits_do_not_depend_on_the_split_into_calls(params):
    def halved(weights):
        return weights.at[:, 1].multiply(0.5)

    for place, change in (("weights", halved), ("latent", lambda c: c.at[..., 2].set(0))):
        edited = build(CONFIG).edited({f"block_*/latent_attention/{place}": change})
        want, _ = edited.apply({"params": params}, TOKENS)
        cache, got = init_cache(CONFIG, ROWS, T), []
        for part in (TOKENS[:, :6], TOKENS[:, 6:]):
            logits, cache = edited.apply({"params": params}, part, cache=cache)
            got.append(logits)
        assert_near(np.concatenate(got, axis=1), want, ERROR)
        assert np.abs(want - logits_of(CONFIG, params, TOKENS)).max() > 1e-3


@pytest.mark.slow
def test_dropout_drops_the_same_edited_weights(params):
    model = build(replace(CONFIG, attention_dropout=0.4))
    want, _ = model.apply({"params": params}, TOKENS, key=jax.random.key(5))
    same = model.edited({"block_*/latent_attention/weights": lambda w: w * 1.0})
    assert_near(same.apply({"params": params}, TOKENS, key=jax.random.key(5))[0], want, ERROR)
    assert np.abs(want - logits_of(CONFIG, params, TOKENS)).max() > 1e-2


@pytest.mark.slow
def test_adapters_change_and_merge_like_dense_kernels(params):
    lora = LoraConfig(rank=2, targets="all-linear")
    adapters = jax.tree.map(lambda x: x + 0.1, init_lora(params, lora, jax.random.key(2)))
    names = adapters["decoder"]["block_0"]["latent_attention"].keys()
    assert names == {"query_latent", "query", "latent", "rotated_key", "key", "value", "out"}
    adapted, merged = with_adapters(params, adapters, lora), apply_lora(params, adapters, lora)
    want = logits_of(CONFIG, merged, TOKENS)
    assert_near(logits_of(CONFIG, adapted, TOKENS), want, 5 * ERROR)
    _, cache = read(CONFIG, adapted, TOKENS[:, :-1], init_cache(CONFIG, ROWS, T))
    assert_near(read(CONFIG, adapted, TOKENS[:, -1:], cache)[0], want[:, -1:], 5 * ERROR)
    assert np.abs(want - logits_of(CONFIG, params, TOKENS)).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_kernels_equal_dequantized_ones(params, kind):
    small = quantize(params, kind)
    block = small["decoder"]["block_0"]["latent_attention"]
    assert all(hasattr(block[name]["kernel"], "bits") for name in ("latent", "key", "value"))
    dense = jax.tree.map(
        lambda x: x.astype(jnp.float32), small, is_leaf=lambda x: hasattr(x, "bits")
    )
    want = logits_of(CONFIG, dense, TOKENS)
    assert_near(logits_of(CONFIG, small, TOKENS), want, 5 * ERROR)
    _, cache = read(CONFIG, small, TOKENS[:, :-1], init_cache(CONFIG, ROWS, T))
    assert_near(read(CONFIG, small, TOKENS[:, -1:], cache)[0], want[:, -1:], 5 * ERROR)


def test_counts_of_parameters_and_operations():
    kernels = D * QUERY + QUERY * N * (H + R) + D * (C + R) + C * N * (H + HV) + N * HV * D
    block = kernels + QUERY + C + 2 * D * F + 2 * D
    assert num_params(CONFIG) == 2 * block + VOCAB * D + D
    pairs = T * (T + 1) / 2
    forward = 2 * T * (2 * (kernels + 2 * D * F) + VOCAB * D) + 4 * N * (H + R + HV) * pairs
    assert forward_flops(CONFIG, T) == forward
    # all products but those with the token vectors, which are looked up, have two gradients
    assert training_flops(CONFIG, T) == 3 * forward
    # without any other trained parameter, only the products after the key have gradients
    key = LoraConfig(rank=1, targets=("latent_attention/key",), layers=(1,), trained=())
    query = LoraConfig(rank=1, targets=("query_latent",), layers=(1,), trained=())
    assert training_flops(CONFIG, T, lora=key) < training_flops(CONFIG, T, lora=query) < 3 * forward


@pytest.mark.parametrize(
    ("module", "shape", "spec"),
    [
        ("latent", (24, 12), ("fsdp", None)),
        ("key", (12, 4, 6), ("fsdp", "tensor", None)),
        ("value", (12, 4, 6), ("fsdp", "tensor", None)),
    ],
)
def test_kernels_are_split_over_devices(module, shape, spec):
    names = "decoder", "block_0", "latent_attention", module, "kernel"
    assert tuple(parameter_spec(names, shape, dict(fsdp=2, tensor=2))) == spec


@pytest.mark.slow
def test_exported_decoder_reads_prompts_of_any_length(params, tmp_path):
    pytest.importorskip("flatbuffers")
    files = pytest.importorskip("safetensors.numpy")
    export_decoder(tmp_path / "decoder", CONFIG, params, context=T, batch=2)
    programs = (tmp_path / f"decoder/{name}.jax" for name in ("prefill", "step"))
    prefill, step = (export.deserialize(bytearray(path.read_bytes())) for path in programs)
    arrays = files.load_file(tmp_path / "decoder/model.safetensors")
    logits, state = prefill.call(arrays, TOKENS[:2, :7], LENGTHS[:2] * 0 + 7)
    want = logits_of(CONFIG, params, TOKENS[:2])
    assert_near(logits, want[:, 6], ERROR)
    for t in range(7, 10):
        logits, state = step.call(arrays, TOKENS[:2, t], state)
        assert_near(logits, want[:, t], ERROR)
