"""Layers with a state against loops over tokens in NumPy float64, and with all other features.

In the configs, layers 0 and 1 have a state, and layer 2 has attention with a gate. The epsilon of
its norms is large, because the norm of a head multiplies the rounding errors of a small output.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax import export
from jax.sharding import PartitionSpec

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
    save_pretrained,
    speculate,
)
from transformer_jax.attention.masks import Causal, Padding
from transformer_jax.cache import StateCache
from transformer_jax.config import (
    ConfigError,
    GatedDelta,
    MeshConfig,
    ModelConfig,
    ShortConv,
    TrainConfig,
)
from transformer_jax.config.tasks import PrefixTask
from transformer_jax.decoding.batch_rows import gather_rows, select_rows, write_rows
from transformer_jax.decoding.continuous_batching import Batcher, Request, serve_requests
from transformer_jax.decoding.proposers import Draft, PromptLookup
from transformer_jax.decoding.samplers import Sample
from transformer_jax.decoding.slots import init_slots
from transformer_jax.interpret import circuits, logit_attribution, path_patching
from transformer_jax.models.flops import active_params, forward_flops, training_flops
from transformer_jax.models.gated_delta import GatedDeltaNet, GatedShortConv
from transformer_jax.models.lora import apply_lora, init_lora, with_adapters
from transformer_jax.models.quantized import quantize
from transformer_jax.models.streaming import StreamingEncoder, rebase_cache, receptive_field
from transformer_jax.pretrained.tensors import parameter_shapes
from transformer_jax.text import inspect_programs
from transformer_jax.training.placement import parameter_spec
from transformer_jax.training.planning.hardware import Hardware
from transformer_jax.training.planning.plan import remedies

pytestmark = pytest.mark.usefixtures("quick_compilation")

N, NK, H, HV, W = 6, 3, 5, 7, 3
CONFIG = ModelConfig(
    vocab_size=VOCAB, d_model=24, num_layers=3, num_heads=4, num_kv_heads=2, d_ff=38, max_len=64,
    positions="rope", norm="rmsnorm", norm_eps=0.01, use_bias=False, init_std=0.2,
    mixers=("gated_delta", "gated_delta", "attention"), attention_gate=True,
    gated_delta=GatedDelta(
        num_key_heads=NK, num_value_heads=N, key_dim=H, value_dim=HV, conv_width=W
    ),
)  # fmt: skip
ONLY = replace(CONFIG, mixers=("gated_delta",), num_kv_heads=None, attention_gate=False)
KIMI = replace(CONFIG.gated_delta, decay_rank=4, gate_rank=9, gate_activation="sigmoid")
CHANNELS = replace(CONFIG, gated_delta=KIMI)
"""Each channel of a key has its own decay, as in Kimi Delta Attention."""
CONV = replace(
    CONFIG, mixers=("short_conv", "short_conv", "attention"), gated_delta=None,
    short_conv=ShortConv(conv_width=5, conv_bias=True),
)  # fmt: skip
"""Two layers are gated short convolutions, as in LFM2."""
STATES = {"hybrid": CONFIG, "states only": ONLY, "kimi": CHANNELS, "conv": CONV}
HOLES = np.arange(T * ROWS).reshape(ROWS, T) % 5 != 2
HOLES = np.where(HOLES, np.cumsum(HOLES, axis=1) - 1, -1)


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, jax.random.key(7))


# Arithmetic


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def reference(params, x, valid, segments, config=CONFIG):
    """Compute the layer token by token in float64, from the equations of its docstring."""
    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    conv = np.concatenate([w[f"{name}_conv"] for name in ("query", "key", "value")], axis=1)
    out, states = np.zeros(x.shape), []
    for b in range(len(x)):
        state, past, document = np.zeros((N, H, HV)), [], None
        for t in range(x.shape[1]):
            if not valid[b, t]:
                continue
            if segments[b, t] != document:
                state, past, document = np.zeros((N, H, HV)), [], segments[b, t]

            def project(name, x=x[b, t]):
                x = project(f"{name}_latent", x) if f"{name}_latent" in w else x
                return np.einsum("d,d...->...", x, w[name]["kernel"])

            joined = [project(name).ravel() for name in ("query", "key", "value")]
            past = [*past, np.concatenate(joined)][-W:]
            mixed = sum(conv[W - 1 - i] * one for i, one in enumerate(reversed(past)))
            mixed = mixed * sigmoid(mixed)
            q, k, v = np.split(mixed, [NK * H, 2 * NK * H])
            q, k = (y.reshape(NK, H).repeat(N // NK, axis=0) for y in (q, k))
            q, k = (y / np.sqrt((y * y).sum(axis=1, keepdims=True) + 1e-6) for y in (q, k))
            v, beta = v.reshape(N, HV), sigmoid(project("beta"))
            beta = 2 * beta if config.gated_delta.negative_eigenvalues else beta
            step = np.log1p(np.exp(project("decay") + w["decay_bias"]))
            step = step.reshape(N, -1, 1)  # one number for each head or each channel
            state = state * np.exp(-np.exp(w["decay_rate"])[:, None, None] * step)
            wrong = v - np.einsum("nhv,nh->nv", state, k)
            state = state + np.einsum("n,nh,nv->nhv", beta, k, wrong)
            y = np.einsum("nhv,nh->nv", state, q) / np.sqrt(H)
            eps = config.gated_delta.norm_eps or config.norm_eps
            y = y / np.sqrt((y * y).mean(axis=1, keepdims=True) + eps) * w["head_scale"]
            gate = project("gate")
            gate = sigmoid(gate) * (gate if config.gated_delta.gate_activation == "silu" else 1)
            out[b, t] = np.einsum("nv,nvd->d", y * gate, w["out"]["kernel"])
        states.append(state)
    return out, np.stack(states)


@pytest.mark.slow_except("holes")
@pytest.mark.parametrize("positions", [LEFT, RIGHT, HOLES], ids=["left", "right", "holes"])
def test_layer_equals_recurrence_in_float64(rng, positions):
    layer, x = GatedDeltaNet(CONFIG), rng.normal(size=(ROWS, T, 24)).astype(np.float32)
    params = layer.init({"params": jax.random.key(1)}, x)["params"]
    params["head_scale"] = jnp.asarray(rng.normal(size=HV).astype(np.float32))
    segments = np.cumsum(rng.random((ROWS, T)) < 0.2, axis=1)
    got, _ = layer.apply({"params": params}, x, positions=positions, segments=segments)
    want, _ = reference(params, x, positions >= 0, segments)
    real = positions >= 0
    assert_near(np.asarray(got)[real], want[real], 5 * FORWARD_F32)


@pytest.mark.parametrize(
    "changes",
    [
        dict(negative_eigenvalues=True, norm_eps=0.1),
        dict(decay_rank=4), dict(gate_rank=9), dict(gate_activation="sigmoid"),
    ],
)  # fmt: skip
def test_options_equal_recurrence(rng, changes):
    sizes = replace(CONFIG.gated_delta, **changes)
    config = replace(CONFIG, gated_delta=sizes)
    layer, x = GatedDeltaNet(config), rng.normal(size=(ROWS, T, 24)).astype(np.float32)
    params = layer.init({"params": jax.random.key(1)}, x)["params"]
    got, _ = layer.apply({"params": params}, x)
    want, _ = reference(params, x, np.ones((ROWS, T), bool), np.zeros((ROWS, T)), config)
    assert_near(got, want, 5 * FORWARD_F32)


@pytest.mark.parametrize("positions", [LEFT, RIGHT, HOLES], ids=["left", "right", "holes"])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_convolution_equals_loop_in_float64(rng, positions, bias):
    config = replace(CONV, short_conv=ShortConv(conv_width=5, conv_bias=bias))
    layer, x = GatedShortConv(config), rng.normal(size=(ROWS, T, 24)).astype(np.float32)
    params = layer.init({"params": jax.random.key(1)}, x)["params"]
    params = jax.tree.map(lambda y: rng.normal(size=y.shape).astype(np.float32), params)
    segments = np.cumsum(rng.random((ROWS, T)) < 0.2, axis=1)
    got, _ = layer.apply({"params": params}, x, positions=positions, segments=segments)
    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def linear(name, x):
        return x @ w[name]["kernel"] + (w[name]["bias"] if bias else 0)

    want = np.zeros(x.shape)
    for b in range(ROWS):
        past, document = [], None
        for t in np.flatnonzero(positions[b] >= 0):
            if segments[b, t] != document:
                past, document = [], segments[b, t]
            past = [*past, linear("input_gate", x[b, t]) * linear("up", x[b, t])][-5:]
            mixed = sum(w["conv"][4 - i] * one for i, one in enumerate(reversed(past)))
            mixed = mixed + (w["conv_bias"] if bias else 0)
            want[b, t] = linear("down", linear("output_gate", x[b, t]) * mixed)
    real = positions >= 0
    assert_near(np.asarray(got)[real], want[real], 5 * FORWARD_F32)


def test_layers_with_a_state_place_their_norms_independently(params):
    """Only the attention of block 2 has norms on its outputs."""
    sizes = replace(CONFIG.gated_delta, norm_order="pre")
    mixed = replace(CONFIG, norm_order="output", gated_delta=sizes)
    norms = {
        name: {norm for norm in block if "norm" in norm}
        for name, block in init_params(mixed, jax.random.key(0))["decoder"].items()
        if name.startswith("block")
    }
    own, others = ("gated_delta", "feed_forward"), ("attention", "feed_forward")
    assert norms["block_0"] == norms["block_1"] == {f"norm_{name}" for name in own}
    assert norms["block_2"] == {f"out_norm_{name}" for name in others}
    only = replace(mixed, mixers=("gated_delta",), num_kv_heads=None, attention_gate=False)
    states = init_params(ONLY, jax.random.key(7))
    np.testing.assert_array_equal(logits_of(only, states, TOKENS), logits_of(ONLY, states, TOKENS))


@pytest.mark.slow
def test_captured_state_equals_recurrence(params, rng):
    name = "block_0/gated_delta/state"
    capture = (name, "block_0/gated_delta/input")
    *_, found = build(CONFIG).apply(
        {"params": params}, TOKENS, positions=jnp.asarray(RIGHT), capture=capture
    )
    block, x = params["decoder"]["block_0"], np.asarray(found["block_0/gated_delta/input"])
    want = reference(block["gated_delta"], x, RIGHT >= 0, np.zeros((ROWS, T)))[1]
    assert found[name].shape == (ROWS, *places(CONFIG)[name][1:])
    assert_near(found[name], want, 5 * FORWARD_F32)


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, CHANNELS, CONV], ids=["hybrid", "kimi", "conv"])
def test_gradients_of_all_parameters_are_finite_and_not_zero(config):
    params = init_params(config, jax.random.key(7))

    def loss(params):
        logits = build(config).apply({"params": params}, TOKENS, positions=jnp.asarray(RIGHT))[0]
        return jnp.where(jnp.asarray(RIGHT >= 0)[..., None], logits, 0).std()

    grads = jax.jit(jax.grad(loss))(params)
    for path, leaf in jax.tree_util.tree_flatten_with_path(grads)[0]:
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0, path


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["attention", "dots", "full"])
@pytest.mark.parametrize("config", [CONFIG, CONV], ids=["hybrid", "conv"])
def test_recomputation_does_not_change_gradients(config, remat):
    params = init_params(config, jax.random.key(7))

    def gradient(config):
        loss = lambda p: logits_of(config, p, TOKENS).std()  # noqa: E731
        return jax.grad(loss)(params)["decoder"]

    want = gradient(config)
    got = gradient(replace(config, remat=remat))
    jax.tree.map(lambda x, y: assert_near(x, y, GRADIENT_F32), got, want)


# Padding and documents


@pytest.mark.slow
@pytest.mark.parametrize("positions", [LEFT, RIGHT, HOLES], ids=["left", "right", "holes"])
@pytest.mark.parametrize(
    "config", [CONFIG, ONLY, CHANNELS, CONV], ids=["hybrid", "only", "kimi", "conv"]
)
def test_padding_changes_no_logits(config, positions):
    params = init_params(config, jax.random.key(7))
    got = np.asarray(logits_of(config, params, TOKENS, positions=jnp.asarray(positions)))
    for row, at in enumerate(positions):
        real = TOKENS[row, at >= 0]
        alone = logits_of(config, params, np.pad(real, (0, T - len(real)))[None])
        assert_near(got[row, at >= 0], alone[0, : len(real)], ERROR)


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, CONV], ids=["hybrid", "conv"])
def test_packed_documents_equal_separate_rows(config):
    params = init_params(config, jax.random.key(7))
    starts = (0, 4, 5, 13, T)
    segments = np.repeat(np.arange(4), np.diff(starts))[None].repeat(ROWS, axis=0)
    got = np.asarray(logits_of(config, params, TOKENS, segments=segments))
    for start, end in pairwise(starts):
        alone = np.pad(TOKENS[:, start:end], ((0, 0), (0, T - end + start)))
        alone = logits_of(config, params, alone)
        assert_near(got[:, start:end], alone[:, : end - start], ERROR)


# The cache


@pytest.mark.slow_except("5-hybrid", "5-conv")
@pytest.mark.parametrize(
    "config", [CONFIG, ONLY, CHANNELS, CONV], ids=["hybrid", "only", "kimi", "conv"]
)
@pytest.mark.parametrize("chunk", [1, 5, T])
def test_cached_logits_equal_full_pass(config, chunk):
    params = init_params(config, jax.random.key(7))
    want, cache = logits_of(config, params, TOKENS), init_cache(config, ROWS, T)
    got = []
    for start in range(0, T, chunk):
        part = TOKENS[:, start : start + chunk]
        logits, cache = read(config, params, part, cache)
        got.append(logits)
    assert_near(np.concatenate(got, axis=1), want, ERROR)
    assert cache.length.tolist() == [T] * ROWS


@pytest.mark.slow
@pytest.mark.parametrize("slack", [0, 3])
@pytest.mark.parametrize("positions", [LEFT, RIGHT, HOLES], ids=["left", "right", "holes"])
@pytest.mark.parametrize("config", [CONFIG, CONV], ids=["hybrid", "conv"])
def test_padded_chunks_leave_state_and_tail_unchanged(config, positions, slack):
    """Rows are read in chunks in which some rows contain only padding."""
    params = init_params(config, jax.random.key(7))
    cache = init_cache(config, ROWS, T, slack=slack)
    for start in range(0, T, 4):
        part = slice(start, start + 4)
        _, cache = read(config, params, TOKENS[:, part], cache, jnp.asarray(positions[:, part]))
    assert cache.length.tolist() == (positions.max(axis=1) + 1).tolist()
    for row in range(ROWS):
        real = TOKENS[row : row + 1, positions[row] >= 0]
        _, alone = read(config, params, real, init_cache(config, 1, T, slack=slack))
        for got, want in zip(cache.layers[:2], alone.layers[:2], strict=True):
            for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                assert_near(x[row], y[0], ERROR)


def test_cache_of_a_layer_with_a_state_does_not_grow():
    state, tail = N * H * HV * 4, (W - 1) * (2 * NK * H + N * HV) * 4
    keys = lambda slots: slots * (2 * 2 * 6 * 4 + 4)  # noqa: E731
    for slots in (11, 1009):
        want = 2 * (state + tail + 4) + keys(slots) + 4
        assert cache_bytes(CONFIG, 1, slots) == want
        assert cache_bytes(CONFIG, 5, slots) == 5 * want
        for config, decays in ((CONFIG, N), (CHANNELS, N * H)):
            pending = 2 * NK * H + N * HV + NK * H + N * HV + decays + N
            found = cache_bytes(config, 1, slots, slack=7)
            assert found == want + 2 * 4 * (7 * pending + 1)
    cache = init_cache(replace(CONFIG, dtype="bfloat16"), 2, 11, jnp.int8)
    assert isinstance(cache.layers[0], StateCache) and cache.capacity == 11
    assert (cache.layers[0].state.dtype, cache.layers[0].tail.dtype) == (jnp.float32, jnp.bfloat16)
    assert init_cache(ONLY, 2, 11).capacity == 0
    assert cache_bytes(CONV, 5, 11) == 5 * (2 * (4 * 24 * 4 + 4) + keys(11) + 4)
    assert init_cache(CONV, 2, 11, jnp.int8).layers[0].state is None


@pytest.mark.slow
@pytest.mark.parametrize("slack", [0, 2])
@pytest.mark.parametrize("config", [CONFIG, CONV], ids=["hybrid", "conv"])
def test_rows_of_a_cache_are_forked_gathered_selected_and_reset(config, slack):
    params = init_params(config, jax.random.key(7))
    _, cache = read(config, params, TOKENS, init_cache(config, ROWS, 2 * T, slack=slack))
    want = logits_of(config, params, np.concatenate([TOKENS, TOKENS[::-1, :4]], axis=1))[:, T:]
    rows = jnp.array([2, 0, 2, 1])
    copies = gather_rows(fork(cache, 2), 2 * rows + 1)
    new = jnp.asarray(TOKENS[::-1, :4])[rows]
    assert_near(read(config, params, new, copies)[0], want[rows], ERROR)
    written = write_rows(cache, jnp.array([2]), init_cache(config, 1, 2 * T, slack=slack))
    reset = select_rows(jnp.array([False, True, True]), written, cache)
    logits, _ = read(config, params, jnp.asarray(TOKENS[::-1, :4]), reset)
    assert_near(logits[:2], want[:2], ERROR)
    assert_near(logits[2], logits_of(config, params, TOKENS[::-1, :4])[2], ERROR)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [CONFIG, ONLY, CHANNELS, CONV], ids=["hybrid", "only", "kimi", "conv"]
)
def test_ragged_prompts_generate_the_tokens_of_the_full_pass(config):
    params = init_params(config, jax.random.key(7))
    out = generate(
        make_step(build(config)), params, TOKENS, init_cache(config, ROWS, 2 * T), num_tokens=7,
        lengths=LENGTHS, chunk=4,
    )  # fmt: skip
    for row, (length, new) in enumerate(zip(LENGTHS, np.asarray(out.tokens), strict=True)):
        text = np.concatenate([TOKENS[row, :length], new])
        logits = logits_of(config, params, np.pad(text, (0, 2 * T - len(text)))[None])[0]
        assert logits[length - 1 : length + 6].argmax(axis=-1).tolist() == new.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, CONV], ids=["hybrid", "conv"])
def test_beam_scores_equal_the_full_pass(config):
    params = init_params(config, jax.random.key(7))
    found = beam_search(
        make_step(build(config)), params, TOKENS, init_cache(config, ROWS, 2 * T), lengths=LENGTHS,
        num_tokens=5, num_beams=3, num_results=3,
    )  # fmt: skip
    for row, length in enumerate(LENGTHS):
        for new, score in zip(
            np.asarray(found.tokens)[row], np.asarray(found.log_probs)[row], strict=True
        ):
            text = np.concatenate([TOKENS[row, :length], new])
            logits = logits_of(config, params, np.pad(text, (0, 2 * T - len(text)))[None])[0]
            log_p = jax.nn.log_softmax(logits[length - 1 : length + 4], axis=-1)
            assert_near(score, np.take_along_axis(log_p, new[:, None], axis=1).sum(), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, CONV], ids=["hybrid", "conv"])
def test_served_requests_equal_separate_generation(config):
    """Slots are reused, so their states must be replaced."""
    params = init_params(config, jax.random.key(7))
    step, rng = make_step(build(config)), np.random.default_rng(5)
    requests = [
        Request(rng.integers(0, VOCAB, rng.integers(1, 12)), int(rng.integers(1, 9)), id=i)
        for i in range(7)
    ]
    got = serve_requests(step, params, requests, init_cache(config, 1, T), slots=2, capacity=T)
    for answer in got:
        request = requests[answer.id]
        out = generate(
            step, params, request.prompt[None], init_cache(config, 1, T),
            num_tokens=request.num_tokens,
        )  # fmt: skip
        assert answer.error is None and answer.tokens.tolist() == out.tokens[0].tolist()


# Dropped tokens

SLACK = 5
EMPTY = partial(init_cache, batch=ROWS, capacity=2 * T, slack=SLACK)


@pytest.mark.slow_except("2-hybrid")
@pytest.mark.parametrize("config", STATES.values(), ids=STATES)
@pytest.mark.parametrize("chunk", [1, 2, T])
def test_rewound_cache_equals_cache_that_never_read_the_tokens(config, chunk):
    """Each row drops another number of tokens, all at once or in two steps."""
    params = init_params(config, jax.random.key(7))
    kept = np.array([T, T - 2, T - SLACK])
    after = np.random.default_rng(5).integers(0, VOCAB, (ROWS, 7))
    text = np.zeros((ROWS, T + 7), np.int32)
    for row, n in enumerate(kept):
        text[row, : n + 7] = np.concatenate([TOKENS[row, :n], after[row]])
    want = logits_of(config, params, text)

    def finish(cache):
        logits = []
        for t in range(0, 7, chunk):
            part, cache = read(config, params, after[:, t : t + chunk], cache)
            logits.append(part)
        return np.concatenate(logits, axis=1), cache

    cache = EMPTY(config)
    for t in range(0, T, chunk):
        _, cache = read(config, params, TOKENS[:, t : t + chunk], cache)
    assert cache.layers[0].pending.count.tolist() == [SLACK] * ROWS
    whole = rewind_cache(cache, jnp.asarray(kept))
    assert whole.length.tolist() == kept.tolist()
    assert whole.layers[0].pending.count.tolist() == [SLACK, SLACK - 2, 0]
    steps = rewind_cache(rewind_cache(cache, jnp.asarray(kept + 1)), jnp.asarray(kept))
    jax.tree.map(np.testing.assert_array_equal, steps, whole)
    logits, rewound = finish(whole)
    short = jnp.asarray(np.where(np.arange(T) < kept[:, None], np.arange(T), -1))
    _, never = finish(read(config, params, TOKENS, EMPTY(config), short)[1])
    for row, n in enumerate(kept):
        assert_near(logits[row], want[row, n : n + 7], ERROR)
    for got, one in zip(rewound.layers[:2], never.layers[:2], strict=True):
        jax.tree.map(lambda x, y: assert_near(x, y, 5 * ERROR), got, one)


@pytest.mark.slow
@pytest.mark.parametrize("config", STATES.values(), ids=STATES)
def test_speculation_with_states_equals_plain_decoding(config):
    """Model and draft have states; a draft that is the model is right, greedy or sampled."""
    params, other = (init_params(config, jax.random.key(n)) for n in (7, 8))
    near = jax.tree.map(lambda x, y: x + 0.05 * y, params, other)
    step = make_step(build(config))
    want = generate(step, params, TOKENS, EMPTY(config), num_tokens=17, lengths=LENGTHS)
    run = partial(
        speculate, step, params, TOKENS, num_tokens=17, num_draft=SLACK, lengths=LENGTHS
    )  # fmt: skip
    for proposer in (PromptLookup(2), Draft(step, near, EMPTY(config))):
        got = run(EMPTY(config), proposer=proposer)
        np.testing.assert_array_equal(got.tokens, want.tokens)
        assert_near(got.log_probs, want.log_probs, 2e-5)
        assert (got.accepted > 0).any() and (got.accepted < got.proposed).any()
        # guesses of the convolutional model's loops may all be wrong in one row
        assert got.calls < 16 or config is CONV
    same = run(
        EMPTY(config), proposer=Draft(step, params, EMPTY(config)), sampler=Sample(),
        key=jax.random.key(3),
    )  # fmt: skip
    np.testing.assert_array_equal(same.accepted, same.proposed)
    jax.tree.map(
        lambda x, y: assert_near(x, y, 5 * ERROR),
        same.state.layers[0],
        same.proposer_state.layers[0],
    )


@pytest.mark.slow
def test_captured_state_includes_pending_tokens(params):
    """The prompt is shorter than the slack, so all its tokens are pending."""
    name, few, slack = "block_1/gated_delta/state", TOKENS[:, :3], 7
    run = partial(build(CONFIG).apply, {"params": params}, few, capture=(name,))
    *_, want = run()
    cache = init_cache(CONFIG, ROWS, T, slack=slack)
    filled = replace(cache.layers[1], pending=jax.tree.map(jnp.ones_like, cache.layers[1].pending))
    filled = replace(filled, pending=replace(filled.pending, count=jnp.zeros(ROWS, jnp.int32)))
    layers = (cache.layers[0], filled, cache.layers[2])  # what follows the count is never read
    for one in (cache, replace(cache, layers=layers)):
        *_, found = run(cache=one)
        assert_near(found[name], want[name], ERROR)


@pytest.mark.slow
def test_tokens_that_a_state_includes_cannot_be_dropped(params):
    _, cache = read(CONFIG, params, TOKENS, EMPTY(CONFIG))
    rule = f"must be at least {T - 5}, because the state of the layer already includes"
    lengths = jnp.array([T, T - 6, T - 5])
    with pytest.raises(ValueError, match=rf"length\[1\] is {T - 6}: {rule}.*slack=5"):
        rewind_cache(cache, lengths)
    narrow = replace(CONFIG, gated_delta=replace(CONFIG.gated_delta, conv_width=1))  # no tail
    for config in (CONFIG, narrow, CONV):
        own = init_params(config, jax.random.key(7))
        _, each = read(config, own, TOKENS, EMPTY(config))
        logits, _ = read(config, own, TOKENS[:, :1], jax.jit(rewind_cache)(each, lengths))
        assert np.isnan(logits[1]).all() and np.isfinite(logits[::2]).all()
    with pytest.raises(ValueError, match=r"length is int32\[2\]: must be integers \[3\]"):
        rewind_cache(init_cache(ONLY, 3, T, slack=1), lengths[:2])
    _, cache = read(CONFIG, params, TOKENS, init_cache(CONFIG, ROWS, 2 * T))
    with pytest.raises(
        ValueError, match="rewind_cache of a StateCache with slack 0: a layer with a state"
    ):
        rewind_cache(cache, jnp.array([3, 3, 3]))
    rule = "does not support a StateCache: the state of a layer includes all tokens"
    with pytest.raises(ValueError, match=f"rebase_cache {rule}"):
        rebase_cache(init_cache(replace(CONFIG, window=5), 1, 5), replace(CONFIG, window=5))
    step = make_step(build(CONFIG))
    call = partial(speculate, step, params, TOKENS[:, :5], num_tokens=3, num_draft=2)
    rule = r"has slack [01]: must be at least 2, .* to rewind: init_cache\(.., slack=2\)"
    with pytest.raises(ValueError, match=f"^cache of a layer with a state {rule}"):
        call(cache, proposer=PromptLookup())
    draft = Draft(step, params, init_cache(CONFIG, ROWS, T, slack=1))
    with pytest.raises(ValueError, match=f"^the draft's cache of a layer with a state {rule}"):
        call(EMPTY(CONFIG), proposer=draft)
    windows = replace(CONFIG, window=(None, None, 4))
    with pytest.raises(ValueError, match=r"cache capacity is 4: .* window \+ 2 = 6 slots"):
        ring = init_cache(windows, ROWS, T, slack=2)
        layers = (*ring.layers[:2], init_cache(windows, ROWS, T, slack=0).layers[2])
        make_step(build(windows)).check_rewind(replace(ring, layers=layers), 2)
    empty = init_cache(CONFIG, 1, T)
    slots = init_slots(step, params, empty, 2, T)
    with pytest.raises(ValueError, match="shares=True does not support a StateCache: the state of"):
        Batcher(slots, params, iter([]), empty, shares=True)


# What is refused


@pytest.mark.slow
def test_positions_that_a_state_cannot_read_are_rejected(params):
    cache = init_cache(CONFIG, ROWS, 2 * T)
    _, cache = read(CONFIG, params, TOKENS[:, :4], cache)
    model, new = build(CONFIG), TOKENS[:, :2]
    for wrong in ([3, 4], [5, 6], [4, 6]):
        positions = jnp.array([[4, 5], wrong, [4, 5]])
        with pytest.raises(ValueError, match=r"row 1 are .*: must continue from 4 without a gap"):
            model.apply({"params": params}, new, cache=cache, positions=positions)
        logits, _ = read(CONFIG, params, new, cache, positions)  # traced
        assert np.isnan(logits[1]).all() and np.isfinite(logits[::2]).all()
    with pytest.raises(ValueError, match=r"row 2 are \[1, 0\]: must increase"):
        model.apply({"params": params}, new, positions=jnp.array([[0, 1], [-1, 3], [1, 0]]))
    logits = logits_of(CONFIG, params, new, positions=jnp.array([[0, 1], [-1, 3], [1, 0]]))
    assert np.isnan(logits[2]).all() and np.isfinite(logits[:2]).all()
    with pytest.raises(ConfigError, match="context does not support layers with a state"):
        TrainConfig(model=CONFIG, context=8, mesh=MeshConfig(context=2))


@pytest.mark.slow
def test_unsupported_calls_name_the_reason(params):
    model, apply = build(CONFIG), partial(build(CONFIG).apply, {"params": params})
    with pytest.raises(ValueError, match=r"layers with a state support only Causal\(\)"):
        apply(TOKENS, mask=Causal() & Padding(jnp.asarray(RIGHT >= 0)))
    assert_near(apply(TOKENS, mask=Causal())[0], apply(TOKENS)[0], FORWARD_F32)
    with pytest.raises(ValueError, match="a paged cache supports no layers with a state"):
        init_paged_cache(CONFIG, 2, 16, num_pages=4, page_size=4)
    with pytest.raises(ValueError, match=r"cache.layers\[0\] is of type KVCache, but layer 0"):
        apply(TOKENS, cache=init_cache(replace(CONFIG, mixers=None, gated_delta=None), ROWS, T))
    with pytest.raises(ValueError, match="is of type StateCache, but layer 2"):
        apply(TOKENS, cache=init_cache(ONLY, ROWS, T))
    wide = replace(CONV, d_model=2 * NK * H + N * HV, num_heads=1, num_kv_heads=1)
    wide = replace(wide, short_conv=ShortConv(conv_width=W))  # its tail has the same shape
    state = rf"\({N}, {H}, {HV}\)"
    with pytest.raises(ValueError, match=rf"state None and .*gated_delta\) needs state {state}"):
        apply(TOKENS, cache=init_cache(wide, ROWS, T, slack=2))
    with pytest.raises(ValueError, match=rf"has state {state} and .*short_conv\) needs state None"):
        build(CONV).apply({"params": {}}, TOKENS, cache=init_cache(CONFIG, ROWS, T))
    with pytest.raises(ValueError, match="a StreamingEncoder needs attention"):
        StreamingEncoder(replace(CONFIG, window=5), frame_dim=3)
    with pytest.raises(ValueError, match="layers with a state have no window"):
        receptive_field(replace(CONFIG, window=5))
    with pytest.raises(ValueError, match="but states can only be captured"):
        model.edited({"block_0/gated_delta/state": lambda state: state})
    with pytest.raises(ValueError, match=r"block_2/gated_delta|mixers is"):
        build(ONLY).apply({"params": params}, TOKENS)


def test_tools_that_compare_all_layers_need_attention_in_each(params):
    model, rule = build(CONFIG), "mixers is .*"
    with pytest.raises(ValueError, match=f"{rule}: circuits need attention"):
        circuits(model, params, "qk")
    with pytest.raises(ValueError, match=f"{rule}: every layer must have attention"):
        logit_attribution(model, params, TOKENS, 3)
    with pytest.raises(ConfigError, match=f"{rule}: every layer must have attention to be"):
        inspect_programs.branches(CONFIG)
    flags = [flag for flag, _ in remedies(TrainConfig(model=CONFIG), Hardware("cpu", None, 1))]
    assert len(flags) > 2 and not any("--scan-layers" in flag for flag in flags)


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, CONV], ids=["hybrid", "conv"])
def test_path_patching_freezes_branches_with_states(config):
    """With every branch frozen, a sender affects the logits only along the residual stream."""
    params = init_params(config, jax.random.key(7))
    model, other = build(config), (TOKENS + 1) % VOCAB
    first = f"block_0/{config.mixer(0)}/{'output' if config == CONV else 'heads'}"
    got = path_patching(
        model, params, TOKENS, other, first, "logits", lambda logits: logits[:, -1, 3], each=()
    )
    *_, clean = model.apply({"params": params}, TOKENS, capture=(first,))
    *_, found = model.apply({"params": params}, other, capture=("block_2/residual", first))
    moved = clean[first] - found[first]
    if config == CONFIG:
        out = params["decoder"]["block_0"]["gated_delta"]["out"]["kernel"]
        moved = jnp.einsum("BTNH,NHD->BTD", moved, out)
    x = np.asarray(found["block_2/residual"] + moved, np.float64)[:, -1]
    x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config.norm_eps)
    x = x * np.asarray(params["decoder"]["norm"]["scale"], np.float64)
    assert_near(got[0], x @ np.asarray(params["embed"]["tokens"], np.float64)[3], 2e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(mixers=()), r"mixers is \(\): a pattern must have from 1 to 3 \(num_layers\) items"),
        (dict(mixers=("mamba",)), r"mixers is \('mamba',\): must be"),
        (dict(kind="encoder"), "mixers is .*: needs kind 'decoder'"),
        (dict(scan_layers=True), "mixers is .*: a pattern needs a looped stack: scan_layers False"),
        (dict(gated_delta=None), "gated_delta is None: must be set, because mixers contains"),
        (dict(mixers=None), "gated_delta is .*: needs gated_delta in mixers"),
        (dict(mixers=("gated_delta",)), "num_kv_heads is 2: needs attention in a layer: mixers"),
        (
            dict(gated_delta=replace(CONFIG.gated_delta, norm_order="output"), first_norm=False),
            "first_norm is False: needs norm_order 'pre' in layer 0",
        ),
        (dict(short_conv=ShortConv()), "short_conv is .*: needs short_conv in mixers"),
        (dict(mixers=("short_conv",), gated_delta=None), "short_conv is None: must be set"),
        (dict(invariant=True), "cannot be promised for layers with a state"),
        (
            dict(norm_order="post", gated_delta=GatedDelta(norm_order="pre")),
            "gated_delta.norm_order is 'pre': needs a norm and norm_order 'pre', 'sandwich' or",
        ),
    ],
)
def test_invalid_patterns_are_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **changes)


def test_task_that_reads_a_source_in_both_directions_needs_attention():
    with pytest.raises(
        ConfigError, match="bidirectional is True: must be False, because layers with"
    ):
        PrefixTask().check_model(CONFIG)
    PrefixTask(bidirectional=False).check_model(CONFIG)
    PrefixTask().check_model(replace(CONFIG, mixers=None, gated_delta=None))


@pytest.mark.parametrize("slack", [0, 3])
def test_no_tokens_have_no_logits_and_leave_the_cache_unchanged(params, slack):
    apply = partial(build(CONFIG).apply, {"params": params}, jnp.zeros((2, 0), jnp.int32))
    assert apply()[0].shape == (2, 0, VOCAB)
    cache = init_cache(CONFIG, 2, 8, slack=slack)
    logits, after = apply(cache=fork(cache, 1))
    assert logits.shape == (2, 0, VOCAB)
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), cache, after))


@pytest.mark.parametrize("module", ["gate", "value", "beta", "decay"])
def test_kernels_of_states_are_split_over_devices(module):
    sizes, shape = dict(fsdp=2, tensor=2), (24, 4, 8) if module in ("gate", "value") else (24, 4)
    names = "decoder", "block_0", "gated_delta", module, "kernel"
    assert parameter_spec(names, shape, sizes)[:2] == ("fsdp", "tensor")
    latent = "decoder", "block_0", "gated_delta", f"{module}_latent", "kernel"
    if module in ("gate", "decay"):
        assert parameter_spec(latent, (24, 8), sizes) == PartitionSpec("fsdp", None)
    for name, split in (("output_gate", ("fsdp", "tensor")), ("down", ("tensor", "fsdp"))):
        names = "decoder", "block_0", "short_conv", name, "kernel"
        assert parameter_spec(names, (24, 24), sizes) == PartitionSpec(*split)
    gate = "decoder", "block_2", "attention", "gate", "kernel"
    assert parameter_spec(gate, (24, 4, 6), sizes)[:2] == ("fsdp", "tensor")


def test_dtype_of_keys_needs_a_layer_with_keys():
    states = replace(CONFIG, mixers=("gated_delta",), num_kv_heads=None, attention_gate=False)
    assert init_cache(states, 2, 8).capacity == 0
    with pytest.raises(ValueError, match="dtype is int8: must be None, because no layer caches"):
        init_cache(states, 2, 8, dtype=jnp.int8)
    assert init_cache(CONFIG, 2, 8, dtype=jnp.int8).layers[2].k.dtype == jnp.int8


def test_key_heads_must_divide_value_heads():
    with pytest.raises(ConfigError, match="num_key_heads is 3: must divide num_value_heads 4"):
        GatedDelta(num_key_heads=3, num_value_heads=4)


# Other features of a model


def test_pattern_repeats_over_the_layers():
    config = replace(CONFIG, num_layers=5)
    names = {name.rpartition("/")[0] for name in places(config)}
    for i, mixer in enumerate(("gated_delta", "gated_delta", "attention") * 2):
        other = "attention" if mixer == "gated_delta" else "gated_delta"
        assert (i == 5) or ({f"block_{i}/{mixer}"} <= names and f"block_{i}/{other}" not in names)


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, CHANNELS, CONV], ids=["hybrid", "kimi", "conv"])
def test_captures_are_the_values_that_edits_replace(config):
    model, params = build(config), init_params(config, jax.random.key(7))
    branch = f"block_1/{config.mixer(1)}/"
    names = [n for n in places(config) if n.startswith(branch) and "state" not in n]
    want, _, found = model.apply({"params": params}, TOKENS, capture=names)
    assert len(names) == (6 if config == CONV else 8)
    for name in names:
        assert found[name].shape == tuple(
            dict(B=ROWS, T=T).get(size, size) for size in places(config)[name]
        )
        same = model.edited({name: lambda x, name=name: found[name]})
        assert_near(same.apply({"params": params}, TOKENS)[0], want, FORWARD_F32)
        changed = model.edited({name: lambda x: 0.5 * x}).apply({"params": params}, TOKENS)[0]
        # the norm of the heads removes a factor of the queries, except for its epsilon
        assert np.abs(changed - want).max() > 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize("slack", [0, 3])
def test_edit_does_not_depend_on_the_split_into_calls(params, slack):
    edited = build(CONFIG).edited({"block_*/gated_delta/value": lambda v: v.at[:, :, 1].set(0)})
    want, _ = edited.apply({"params": params}, TOKENS)
    cache, got = init_cache(CONFIG, ROWS, T, slack=slack), []
    for part in (TOKENS[:, :6], TOKENS[:, 6:]):
        logits, cache = edited.apply({"params": params}, part, cache=cache)
        got.append(logits)
    assert_near(np.concatenate(got, axis=1), want, ERROR)


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, CHANNELS, CONV], ids=["hybrid", "kimi", "conv"])
def test_adapters_change_and_merge_like_dense_kernels(config):
    params = init_params(config, jax.random.key(7))
    lora = LoraConfig(rank=2, targets="all-linear")
    adapters = init_lora(params, lora, jax.random.key(2))
    adapters = jax.tree.map(lambda x: x + 0.05, adapters)
    first, last = adapters["decoder"]["block_0"], adapters["decoder"]["block_2"]
    names = {n for n in first[config.mixer(0)] if "latent" not in n}
    assert last["attention"].keys() == {"query", "key", "value", "gate", "out"}
    if config == CONV:
        assert names == {"up", "input_gate", "output_gate", "down"}
    else:
        assert names == {*last["attention"], "beta", "decay"}
    got = logits_of(config, with_adapters(params, adapters, lora), TOKENS)
    merged = logits_of(config, apply_lora(params, adapters, lora), TOKENS)
    assert_near(got, merged, 5 * ERROR)
    assert np.abs(got - logits_of(config, params, TOKENS)).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, CHANNELS, CONV], ids=["hybrid", "kimi", "conv"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_kernels_equal_dequantized_ones(config, kind):
    params = init_params(config, jax.random.key(7))
    small = quantize(params, kind)
    block = small["decoder"]["block_0"][config.mixer(0)]
    names = ("up", "down") if config == CONV else ("query", "gate", "out")
    assert all(hasattr(block[name]["kernel"], "bits") for name in names)
    assert block["conv" if config == CONV else "value_conv"].ndim == 2
    assert hasattr(small["decoder"]["block_2"]["attention"]["gate"]["kernel"], "bits")
    dense = jax.tree.map(
        lambda x: x.astype(jnp.float32), small, is_leaf=lambda x: hasattr(x, "bits")
    )
    got = logits_of(config, small, TOKENS)
    assert_near(got, logits_of(config, dense, TOKENS), 5 * ERROR)


def test_counts_of_parameters_and_operations():
    D, F = 24, 38
    kernels = D * (2 * NK * H + 2 * N * HV + 2 * N) + N * HV * D
    mixer = kernels + W * (2 * NK * H + N * HV) + 2 * N + HV
    attention, rest = D * (4 + 4 + 2 + 2) * 6 + 4 * 6 * D, 2 * D * F + 2 * D
    assert num_params(CONFIG) == VOCAB * D + 2 * mixer + attention + 3 * rest + D
    assert active_params(CONFIG) == num_params(CONFIG)
    # a token multiplies the state with its key, adds a product to it, and multiplies it by a query
    per_token = 2 * (kernels + 3 * N * H * HV) * 2 + 2 * attention + 3 * 4 * D * F + 2 * VOCAB * D
    pairs = T * (T + 1) / 2
    forward = per_token * T + 2 * 4 * 12 * pairs
    assert forward_flops(CONFIG, T) == forward
    # all products but those with the token vectors, which are looked up, have two gradients
    assert training_flops(CONFIG, T) == 3 * forward
    more = (4 * N * H - D * N + D * 4) + (9 * N * HV - D * N * HV + D * 9)
    assert num_params(CHANNELS) == num_params(CONFIG) + 2 * (more + N * H - N)
    assert forward_flops(CHANNELS, T) == forward + 2 * 2 * more * T
    assert training_flops(CHANNELS, T) == 3 * forward_flops(CHANNELS, T)
    both = 2 * (4 * D * D + 4 * D + 5 * D + D - mixer)
    assert num_params(CONV) == num_params(CONFIG) + both
    less = 2 * (kernels + 3 * N * H * HV - 4 * D * D) * 2 * T
    assert forward_flops(CONV, T) == forward - less
    assert training_flops(CONV, T) == 3 * forward_flops(CONV, T)


def test_only_adapters_of_states_are_trained():
    """The gradient of a frozen kernel is not computed, but that of its input may be."""
    names = ("decoder/block_2/attention",)
    lora = LoraConfig(rank=1, targets=("gated_delta/query",), layers=(1,), trained=())
    frozen = ("embed", "decoder/block_0", "decoder/block_1")
    whole = training_flops(CONFIG, T)
    less = training_flops(CONFIG, T, frozen=frozen)
    assert forward_flops(CONFIG, T) < less < whole
    assert forward_flops(CONFIG, T) < training_flops(CONFIG, T, lora=lora) < whole
    assert training_flops(CONFIG, T, frozen=names) < whole
    # the gradient of the first of two kernels passes through the second
    first, second = (
        training_flops(CHANNELS, T, lora=replace(lora, targets=(f"gated_delta/{name}",)))
        for name in ("decay_latent", "decay")
    )
    assert first - second > 2 * 4 * N * H * T
    first, second = (
        training_flops(CONV, T, lora=replace(lora, targets=(f"short_conv/{name}",)))
        for name in ("output_gate", "down")
    )
    assert first - second == 2 * 24 * 24 * T


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, CONV], ids=["hybrid", "conv"])
def test_exported_decoder_has_a_state_for_any_prompt_length(config, tmp_path):
    params = init_params(config, jax.random.key(7))
    pytest.importorskip("flatbuffers")
    files = pytest.importorskip("safetensors.numpy")
    export_decoder(tmp_path / "decoder", config, params, context=T, batch=2)
    programs = (tmp_path / f"decoder/{name}.jax" for name in ("prefill", "step"))
    prefill, step = (export.deserialize(bytearray(path.read_bytes())) for path in programs)
    arrays = files.load_file(tmp_path / "decoder/model.safetensors")
    logits, state = prefill.call(arrays, TOKENS[:2, :7], LENGTHS[:2] * 0 + 7)
    want = logits_of(config, params, TOKENS[:2])
    assert_near(logits, want[:, 6], ERROR)
    sizes = {name: x.shape for name, x in state.items() if name.startswith("layers/0")}
    assert sizes.pop("layers/0/length") == (2,)
    if config == CONV:
        assert sizes == {"layers/0/tail": (2, 4, 24)}
    else:
        assert sizes == {
            "layers/0/state": (2, N, H, HV), "layers/0/tail": (2, W - 1, 2 * NK * H + N * HV)
        }  # fmt: skip
    for t in range(7, 10):
        logits, state = step.call(arrays, TOKENS[:2, t], state)
        assert_near(logits, want[:, t], ERROR)


@pytest.mark.parametrize("depth", [3, 5])
def test_shapes_of_a_pattern_are_those_of_its_parameters(depth):
    config = replace(CHANNELS, num_layers=depth)
    want = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    assert parameter_shapes(config) == flatten_dict(want, sep="/")


def test_families_without_states_reject_a_pattern(tmp_path, params):
    with pytest.raises(ConfigError, match=r"mixers is \['gated_delta', .*: must be .* llama"):
        save_pretrained(tmp_path / "folder", CONFIG, params, family="llama")


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, CONV], ids=["hybrid", "conv"])
def test_exported_call_with_a_cache_can_be_serialized(config):
    params = init_params(config, jax.random.key(7))
    pytest.importorskip("flatbuffers")
    cache = init_cache(config, ROWS, T, slack=2)
    step = jax.jit(partial(build(replace(config, implementation="xla")).apply, {"params": params}))
    call = lambda tokens, cache: step(tokens, cache=cache)  # noqa: E731
    exported = export.deserialize(export.export(jax.jit(call))(TOKENS, cache).serialize())
    logits, after = exported.call(TOKENS, cache)
    assert_near(logits, call(TOKENS, cache)[0], ERROR)
    assert isinstance(after.layers[0], StateCache)
