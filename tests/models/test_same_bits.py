"""`ModelConfig(invariant=True)`: a row has the same bits in every call that contains it."""

import dataclasses
import itertools
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax as tj
from benchmarks.same_bits import readings
from tests.support.tolerances import FORWARD_F32, assert_near, assert_same_bits
from transformer_jax import ConfigError, ModelConfig
from transformer_jax.kernels import cpu

NATIVE = not isinstance(cpu.library(), str)
needs_kernels = pytest.mark.skipif(not NATIVE, reason=f"no kernels: {cpu.library()}")
GPT = dict(vocab_size=61, d_model=64, num_layers=2, num_heads=4, max_len=64)
LLAMA = GPT | dict(
    norm="rmsnorm", positions="rope", glu=True, activation="silu", use_bias=False, num_kv_heads=2,
    tie_embeddings=False,
)  # fmt: skip
CONFIGS = {
    "gpt": GPT,
    "llama": LLAMA,
    "bfloat16": LLAMA | dict(dtype="bfloat16"),
    "window": LLAMA | dict(
        window=5, qk_norm=True, attention_softcap=20.0, attention_sinks=True, logit_softcap=9.0,
        attention_gate=True,
    ),
    "ring": LLAMA | dict(window=(5, None), sink_tokens=2),
    "scanned": GPT | dict(scan_layers=True, remat="full", positions="alibi"),
    "t5": GPT | dict(positions="t5", norm_order="post", embedding_norm=True),
}  # fmt: skip
ROWS, LENGTH = 21, 19


def model_of(fields, invariant=True):
    """Return a model, parameters that are all nonzero, and a compiled forward pass."""
    config = ModelConfig(**fields, invariant=invariant)
    model, params = tj.build(config), tj.init_params(config, jax.random.key(0))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: x + 0.05 * rng.normal(size=x.shape).astype(np.float32), params)
    return model, params, jax.jit(lambda *x, **more: model.apply({"params": params}, *x, **more))


@needs_kernels
@pytest.mark.slow_except("window")
@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)
def test_invariant_logits_have_the_same_bits_in_every_call(fields, rng):
    tokens = rng.integers(0, 61, (ROWS, LENGTH)).astype(np.int32)
    for name, found, wanted in readings(*model_of(fields)[::2], tokens):
        assert np.array_equal(found, wanted), name


@needs_kernels
def test_empty_batch_has_no_logits_and_a_zero_gradient():
    model, params, _ = model_of(GPT)

    def loss(params):
        logits = model.apply({"params": params}, np.zeros((0, 5), np.int32))[0]
        assert logits.shape == (0, 5, 61)
        return tj.cross_entropy(logits, jnp.zeros((0, 5), jnp.int32), invariant=True)[0]

    assert not any(x.any() for x in jax.tree.leaves(jax.jit(jax.grad(loss))(params)))


@needs_kernels
def test_bits_of_a_row_depend_on_the_batch_without_invariant(rng):
    fields = LLAMA | dict(d_model=96)
    tokens = rng.integers(0, 61, (ROWS, LENGTH)).astype(np.int32)
    found = itertools.islice(readings(*model_of(fields, invariant=False)[::2], tokens), 6)
    assert any(not np.array_equal(found, wanted) for _, found, wanted in found)


@needs_kernels
@pytest.mark.slow_except("gpt")
@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)
def test_gradients_of_a_row_have_the_same_bits_in_every_batch(fields, rng):
    model, params, _ = model_of(fields)
    tokens = rng.integers(0, 61, (ROWS, LENGTH)).astype(np.int32)

    @jax.jit
    @jax.grad
    def gradients(params, tokens, weights):
        logits = model.apply({"params": params}, tokens[:, :-1])[0]
        mean, weight = tj.cross_entropy(logits, tokens[:, 1:], weights=weights, invariant=True)
        return mean * weight

    def weights_of(rows, at):
        return np.zeros((rows, LENGTH - 1), np.float32) + (np.arange(rows)[:, None] == at)

    wanted = gradients(params, tokens[4:5], weights_of(1, 0))
    assert all(np.any(x) for x in jax.tree.leaves(wanted))
    for rows, at in ((8, 0), (17, 9)):
        batch = np.delete(tokens, 4, 0)[: rows - 1]
        batch = np.insert(batch, at, tokens[4], 0)
        found = gradients(params, batch, weights_of(rows, at))
        jax.tree.map(assert_same_bits, found, wanted)


MASKS = {
    "causal": tj.Causal(),
    "window": tj.Causal() & tj.Window(300),
    "both sides": tj.Window(130, 41),
}


@needs_kernels
@pytest.mark.slow_except("window-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_attention_has_the_same_bits_in_any_tiles(mask, dtype, rng):
    length = 650  # several tiles of keys, of which some are full for some queries
    q, k, v = (jnp.asarray(rng.normal(size=(2, length, heads, 32)), dtype) for heads in (4, 2, 2))
    attend = jax.jit(partial(tj.dot_product_attention, implementation="invariant", mask=mask))
    wanted = attend(q, k, v)
    positions = np.arange(length)
    for at, count in ((0, 1), (299, 3), (300, 1), (513, 1), (560, 16), (649, 1)):
        some = slice(at, at + count)
        found = attend(q[:, some], k, v, q_positions=positions[some])
        assert_same_bits(found, wanted[:, some])
    for padding in (1, 77):
        padded = [jnp.pad(x, ((0, 0), (padding, 9), (0, 0), (0, 0))) for x in (q, k, v)]
        places = np.pad(positions, (padding, 9), constant_values=-1)
        found = attend(*padded, q_positions=places, k_positions=places)
        assert_same_bits(found[:, padding:-9], wanted)


@needs_kernels
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_gradients_of_attention_have_the_same_bits_in_any_tiles(mask, rng):
    length = 400
    arrays = [
        jnp.asarray(rng.normal(size=(3, length, heads, 16)), jnp.float32) for heads in (4, 2, 2)
    ]
    factors = jnp.asarray(rng.normal(size=(3, length, 4, 16)), jnp.float32)

    @jax.jit
    def gradients(factors, positions, *arrays):
        def weighted(arrays):
            out = tj.dot_product_attention(
                *arrays, mask=mask, q_positions=positions, k_positions=positions,
                implementation="invariant",
            )  # fmt: skip
            return (out * factors).sum()

        return jax.grad(weighted)(arrays)

    positions = np.arange(length)
    wanted = gradients(factors, positions, *arrays)
    for row in range(3):
        alone = gradients(factors[row : row + 1], positions, *(x[row : row + 1] for x in arrays))
        for x, y in zip(alone, wanted, strict=True):
            assert_same_bits(x[0], y[row])
    padding = 77
    padded = [jnp.pad(x, ((0, 0), (padding, 9), (0, 0), (0, 0))) for x in (factors, *arrays)]
    places = np.pad(positions, (padding, 9), constant_values=-1)
    for x, y in zip(gradients(padded[0], places, *padded[1:]), wanted, strict=True):
        assert_same_bits(x[:, padding:-9], y)


@needs_kernels
@pytest.mark.slow_except("3")
@pytest.mark.parametrize("page_size", [3, 8])
def test_pages_do_not_change_the_bits_of_logits(page_size, rng):
    model, _, apply = model_of(LLAMA)
    tokens = rng.integers(0, 61, (5, LENGTH)).astype(np.int32)
    wanted, capacity = np.asarray(apply(tokens)[0]), -(-LENGTH // page_size) * page_size
    sizes = dict(num_pages=capacity // page_size * 5, page_size=page_size)
    cache, found = tj.init_paged_cache(model.config, 5, capacity, **sizes), []
    for part in np.split(tokens, [4, 11, 12], axis=1):
        logits, cache = apply(part, cache=cache)
        found.append(logits)
    assert_same_bits(jnp.concatenate(found, 1), wanted)


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["encoder", "encoder-decoder"])
def test_encoders_have_the_same_bits_in_any_batch(kind, rng):
    model, params, _ = model_of(GPT | dict(kind=kind))
    tokens = rng.integers(0, 61, (ROWS, LENGTH)).astype(np.int32)

    @jax.jit
    def read(source):
        if kind == "encoder":
            return model.apply({"params": params}, source)[0]
        return model.apply({"params": params}, source[:, :9], source=source)[0]

    wanted = read(tokens)
    for rows in (1, 5, 17):
        assert_same_bits(read(tokens[:rows]), wanted[:rows])
        assert_same_bits(read(tokens[-rows:]), wanted[-rows:])


@needs_kernels
@pytest.mark.slow
def test_number_of_threads_does_not_change_bits():
    code = """
import jax, numpy as np, transformer_jax as tj
config = tj.ModelConfig(
    vocab_size=61, d_model=64, num_layers=1, num_heads=1, max_len=300, invariant=True
)
model, params = tj.build(config), tj.init_params(config, jax.random.key(0))
tokens = np.random.default_rng(0).integers(0, 61, (1, 301)).astype(np.int32)
def loss(params):
    logits = model.apply({"params": params}, tokens[:, :-1])[0]
    return tj.cross_entropy(logits, tokens[:, 1:], invariant=True)[0]
found = jax.jit(jax.value_and_grad(loss))(params)
print(hash(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(found))))
"""
    found = set()
    for threads in (1, 7):
        more = {"NPROC": str(threads), "PYTHONHASHSEED": "0"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | more, capture_output=True, text=True
        )
        found.add(done.stdout)
        assert done.stdout.strip(), done.stderr
    assert len(found) == 1


@pytest.mark.slow
@needs_kernels
def test_generated_tokens_and_logits_have_the_same_bits_alone_and_in_a_ragged_batch(rng):
    model, params, _ = model_of(LLAMA)
    step, config = tj.make_step(model), model.config
    prompts, lengths = rng.integers(0, 61, (4, 9)).astype(np.int32), np.array([9, 3, 7, 1])

    def made(prompts, capacity, **more):
        state = tj.init_decode_state(config, params, len(prompts), capacity)
        more |= dict(num_tokens=6, capture=("logits",))
        found = tj.generate(step, params, prompts, state, **more)
        return found.tokens, found.log_probs, found.captured["logits"][:, -6:]

    together = made(prompts, 40, lengths=lengths)
    for row, length in enumerate(lengths):
        alone = made(prompts[row : row + 1, :length], 24, chunk=2 if row else None)
        for found, wanted in zip(alone, together, strict=True):
            assert_same_bits(found[0], wanted[row])


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("way", ["beams", "speculation", "slots"])
def test_log_probs_have_the_same_bits_for_any_other_rows(way, rng):
    # with 1,000 tokens, XLA's softmax has other bits for five rows than for one
    model, params, _ = model_of(LLAMA | dict(vocab_size=1000, num_layers=1))
    step, config = tj.make_step(model), model.config
    prompts = rng.integers(0, 61, (5, 7)).astype(np.int32)

    def log_probs(rows):
        state = tj.init_decode_state(config, params, len(rows), 32)
        if way == "beams":
            found = tj.beam_search(step, params, rows, state, num_tokens=6, num_beams=3)
            return found.log_probs
        if way == "speculation":
            how = dict(proposer=tj.PromptLookup(), num_draft=2, num_tokens=6)
            return tj.speculate(step, params, rows, state, **how).log_probs
        requests = [tj.Request(row, 6, id=i) for i, row in enumerate(rows)]
        state = tj.init_decode_state(config, params, 1, 32)
        done = tj.serve_requests(step, params, requests, state, slots=len(rows), capacity=32)
        return np.stack([x.log_probs for x in sorted(done, key=lambda x: x.id)])

    wanted = log_probs(prompts)
    for row in range(5):
        assert_same_bits(log_probs(prompts[row : row + 1])[0], wanted[row])


@pytest.mark.slow
@needs_kernels
def test_served_requests_have_the_same_tokens_in_any_number_of_slots(rng):
    model, params, _ = model_of(LLAMA)
    step = tj.make_step(model)
    requests = [
        tj.Request(rng.integers(0, 61, size).astype(np.int32), 5, id=i)
        for i, size in enumerate((3, 8, 1, 5, 6))
    ]

    def served(slots, chunk):
        state = tj.init_decode_state(model.config, params, 1, 32)
        done = tj.serve_requests(
            step, params, requests, state, slots=slots, capacity=32, chunk=chunk
        )
        return {x.id: tuple(x.tokens) for x in done}

    assert served(1, None) == served(4, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(implementation="xla"), "implementation is 'xla': must be 'invariant' or None"),
        (dict(positions="shaw"), "invariant is True: cannot be promised for positions 'shaw'"),
        (dict(activation=jnp.sin), "invariant is True: cannot be promised for your own activation"),
        (dict(experts=tj.Experts(count=2)), "cannot be promised for a mixture of experts"),
        (dict(kind="encoder", num_classes=2, pooler="tanh"), "cannot be promised for a pooler"),
    ],
)
def test_config_that_cannot_be_invariant_is_rejected(fields, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**GPT | fields, invariant=True)


@needs_kernels
def test_export_of_an_invariant_model_is_rejected():
    model, params, _ = model_of(GPT)
    with pytest.raises(
        NotImplementedError, match="invariant=True needs a program for a single CPU"
    ):
        jax.export.export(jax.jit(model.apply))({"params": params}, np.zeros((1, 3), np.int32))


def test_invariant_model_without_compiled_kernels_is_rejected(monkeypatch):
    from transformer_jax.kernels.cpu import products

    monkeypatch.setattr(products, "library", lambda: "is left out")
    config = ModelConfig(**GPT, invariant=True)
    params = tj.init_params(dataclasses.replace(config, invariant=False), jax.random.key(0))
    with pytest.raises(NotImplementedError, match="needs the compiled kernels: is left out"):
        tj.build(config).apply({"params": params}, np.zeros((1, 3), np.int32))


def test_environment_variable_makes_every_model_invariant(monkeypatch):
    assert not ModelConfig(**GPT).invariant
    monkeypatch.setenv("TRANSFORMER_JAX_INVARIANT", "1")
    assert ModelConfig(**GPT).invariant


@needs_kernels
def test_losses_of_a_row_have_the_same_bits_in_every_batch(rng):
    from transformer_jax.training.losses import token_losses

    logits = 3 * rng.normal(size=(33, 18, 97)).astype(np.float32)
    labels = rng.integers(0, 97, (33, 18)).astype(np.int32)
    found = jax.jit(token_losses, static_argnames="invariant")
    wanted = found(logits, labels, invariant=True)
    for rows in (1, 2, 8):
        assert_same_bits(found(logits[:rows], labels[:rows], invariant=True), wanted[:rows])
        assert_same_bits(found(logits[-rows:], labels[-rows:], invariant=True), wanted[-rows:])
    exact = logits.astype(np.float64)
    exact = np.log(np.exp(exact).sum(-1)) - np.take_along_axis(exact, labels[..., None], -1)[..., 0]
    assert_near(wanted, exact, FORWARD_F32)


def test_invalid_environment_variable_is_rejected(monkeypatch):
    monkeypatch.setenv("TRANSFORMER_JAX_INVARIANT", "yes")
    with pytest.raises(ConfigError, match="TRANSFORMER_JAX_INVARIANT is 'yes': must be 0 or 1"):
        ModelConfig(**GPT)


@needs_kernels
def test_exported_invariant_attention_is_rejected():
    x = jnp.ones((1, 9, 2, 8))
    attend = jax.jit(lambda x: tj.dot_product_attention(x, x, x, implementation="invariant"))
    assert np.isfinite(attend(x)).all()
    with pytest.raises(
        NotImplementedError, match="invariant=True needs a program for a single CPU"
    ):
        jax.export.export(attend)(x)


@needs_kernels
def test_edit_of_attention_weights_of_an_invariant_model_is_rejected():
    model, params, _ = model_of(GPT)
    edited = model.edited({"block_0/attention/weights": lambda x: x})
    with pytest.raises(NotImplementedError, match="an edit of attention/weights"):
        edited.apply({"params": params}, np.zeros((1, 3), np.int32))
