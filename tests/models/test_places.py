"""Tests of captures and edits: looped and scanned, with and without a cache."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import model_oracle as oracle
from tests.support.tolerances import FORWARD_F32, GRADIENT_F32, assert_near
from transformer_jax import places
from transformer_jax.attention.api import IMPLEMENTATIONS
from transformer_jax.attention.arguments import Implementation
from transformer_jax.config import ModelConfig
from transformer_jax.decoding.beams import beam_search
from transformer_jax.decoding.generation import generate, stream
from transformer_jax.decoding.step import make_step
from transformer_jax.models.factory import build, init_cache, init_params
from transformer_jax.models.stack import stack_layers

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB, B, T, S = 31, 2, 7, 5
SMALL = ModelConfig(
    vocab_size=VOCAB, d_model=14, num_layers=2, num_heads=4, head_dim=6, num_kv_heads=2, d_ff=11,
    max_len=17, positions="rope", init_std=0.3,
)  # fmt: skip
KINDS = {
    "decoder": dict(), "post-norm, GLU, T5": dict(norm_order="post", glu=True, positions="t5"),
    "encoder": dict(kind="encoder"),
    "encoder-decoder": dict(kind="encoder-decoder", attention_gate=True),
    "sandwich, Shaw": dict(norm_order="sandwich", positions="shaw"),
    "attention alone": dict(d_ff=0), "parallel": dict(norm_order="parallel"),
    "parallel, shared": dict(norm_order="parallel_shared", num_kv_heads=None),
}  # fmt: skip
NEAR = 5 * FORWARD_F32


def config_of(kind: str, **changes) -> ModelConfig:
    return dataclasses.replace(SMALL, **KINDS[kind], **changes)


@cache
def params_of(kind: str):
    params = init_params(config_of(kind), jax.random.key(3))
    return jax.tree.map(np.asarray, params)


NOTHING: dict = {}


def draw(columns: int, seed: int = 17) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (B, columns), dtype=np.int32)


def run(kind: str, *, scanned: bool = False, params=None, edit=NOTHING, capture=()):
    config = config_of(kind, scan_layers=scanned)
    params = params_of(kind) if params is None else params
    more = dict(source=draw(S, 5)) if config.kind == "encoder-decoder" else {}

    @jax.jit
    def apply(params):
        params = stack_layers(params) if scanned else params
        model = build(config).edited(edit)
        return model.apply({"params": params}, draw(T), **more, capture=capture)

    return apply(params)


def editable(kind: str) -> list[str]:
    return [name for name in places(config_of(kind)) if not name.endswith("key_positions")]


def tilted(value: jax.Array) -> jax.Array:
    """Change a value unevenly, so that swapped axes would be detected."""
    ramp = jnp.arange(value.shape[-1], dtype=value.dtype) / value.shape[-1]
    return value * 0.9 + 0.1 * ramp.reshape((1,) * (value.ndim - 1) + (-1,))


# Captures


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_captured_values_match_in_looped_and_scanned_stacks(kind):
    names, plain = places(config_of(kind)), run(kind)[0]
    found = []
    for scanned in (False, True):
        logits, _, captured = run(kind, scanned=scanned, capture=tuple(names))
        assert_near(logits, plain, NEAR)
        assert set(captured) == set(names)
        for name, shape in names.items():
            inside = name.startswith("encoder/")
            sizes = {"B": B, "T": S if inside else T, "S": S if inside or "cross" in name else T}
            assert captured[name].shape == tuple(sizes.get(n, n) for n in shape), name
        found.append(captured)
    looped, scanned = found
    for name in names:
        assert_near(scanned[name], looped[name], NEAR, name)


def test_scanned_stack_captures_only_requested_blocks():
    requested = "block_1/residual", "block_0/attention/weights", "block_*/attention/output"
    edit = {"block_1/residual": tilted}
    looped, scanned = (
        run("attention alone", scanned=scanned, capture=requested, edit=edit)[2]
        for scanned in (False, True)
    )
    assert set(looped) == set(scanned) and len(scanned) == 4
    for name in looped:
        assert_near(scanned[name], looped[name], NEAR, name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_captured_values_are_returned_in_requested_order(kind):
    requested = ["logits", "block_1/residual", "block_0/attention/weights", "embedding"]
    model = build(config_of(kind))
    more = dict(source=draw(S, 5)) if kind == "encoder-decoder" else {}
    found = []

    def names(params):
        found.extend(model.apply({"params": params}, draw(T), capture=requested, **more)[2])

    jax.eval_shape(names, params_of(kind))
    assert found == requested


@pytest.mark.slow
def test_captured_values_match_reference():
    """Compare streams and attention weights with the float64 oracle."""
    record: list[np.ndarray] = []
    hidden: list[np.ndarray] = []
    config, params = config_of("decoder"), params_of("decoder")
    logits = oracle.forward(config, params, draw(T), record=record, hidden=hidden)
    found = run("decoder", capture=tuple(places(config)))[2]
    assert_near(found["logits"], logits, NEAR)
    weights = np.stack(record).reshape(B, config.num_layers, 4, T, T)
    streams = np.stack(hidden)
    for i in range(config.num_layers):
        assert_near(found[f"block_{i}/attention/weights"], weights[:, i], NEAR)
    assert_near(found["embedding"], streams[:, 0], NEAR)
    assert_near(found["block_0/residual"], streams[:, 1], NEAR)
    assert_near(found["final_norm"], streams[:, 2], NEAR)


@pytest.mark.slow
def test_captured_values_satisfy_block_equations():
    found = run("decoder", capture=("*", "block_*/*", "block_*/*/*"))[2]
    assert set(found) == set(places(config_of("decoder")))
    x = found["embedding"] + found["block_0/attention/output"]
    assert_near(found["block_0/residual_mid"], x, NEAR)
    assert_near(found["block_0/residual"], x + found["block_0/feed_forward/output"], NEAR)
    kernel = params_of("decoder")["decoder"]["block_1"]["attention"]["out"]
    heads = np.asarray(found["block_1/attention/heads"], np.float64)
    want = np.einsum("btnh,nhd->btd", heads, kernel["kernel"]) + kernel["bias"]
    assert_near(found["block_1/attention/output"], want, NEAR)
    weights, value = (found[f"block_1/attention/{name}"] for name in ("weights", "value"))
    value = np.repeat(np.asarray(value, np.float64), 2, axis=2)
    assert_near(heads, np.einsum("bnts,bsnh->btnh", weights, value), NEAR)


def test_gate_multiplies_the_heads_of_each_attention():
    names = ("heads", "weights", "value", "gate")
    edit = {"block_0/cross_attention/gate": jnp.ones_like}
    for branch, one in ("block_1/attention", 0), ("block_0/cross_attention", 1):
        capture = [f"{branch}/{name}" for name in names]
        found = run("encoder-decoder", edit=edit, capture=capture)[2]
        heads, weights, value, gate = (np.asarray(found[name], np.float64) for name in capture)
        assert (gate == 1).all() == one and gate.shape == heads.shape
        value = np.repeat(value, 2, axis=2)
        assert_near(heads, gate * np.einsum("bnts,bsnh->btnh", weights, value), NEAR)


@pytest.mark.parametrize("kind", ["parallel", "parallel, shared"])
def test_parallel_branches_receive_block_input(kind):
    """Branches do not affect each other, and their outputs are summed."""
    config, rng = config_of(kind, num_layers=1), np.random.default_rng(3)
    shapes = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    params, place = oracle.randomised(shapes, rng), "block_0/attention/output"
    requested = ("embedding", "block_0/*", "block_0/*/input", "block_0/*/output")

    @jax.jit
    def read(added):
        edit = {place: lambda x: x + added}
        return build(config).edited(edit).apply({"params": params}, draw(T), capture=requested)[2]

    found, edited = (jax.tree.map(np.asarray, read(added)) for added in (0.0, 3.0))
    block = jax.tree.map(lambda x: np.asarray(x, np.float64), params["decoder"]["block_0"])
    x = np.asarray(found["embedding"], np.float64)
    normed = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    total = x
    for branch in ("attention", "feed_forward"):
        norm = block["norm" if kind.endswith("shared") else f"norm_{branch}"]
        want = normed * norm["scale"] + norm["bias"]
        assert_near(found[f"block_0/{branch}/input"], want, NEAR)
        total = total + found[f"block_0/{branch}/output"]
    assert_near(found["block_0/residual"], total, NEAR)
    name = "block_0/feed_forward/output"
    np.testing.assert_array_equal(edited[name], found[name])
    assert_near(edited["block_0/residual"], total + 3.0, NEAR)
    assert "block_0/residual_mid" not in places(config_of(kind))


@pytest.mark.slow
def test_captured_value_has_gradient():
    """Compare the gradient of embeddings with differences; later blocks have zero gradient."""
    place, kind = "block_0/residual", "decoder"
    direction = np.random.default_rng(3).standard_normal((B, T, 14)).astype(np.float32)

    def loss(params):
        captured = run(kind, params=params, capture=(place,))[2]
        return (captured[place] * direction).sum()

    slopes = jax.grad(loss)(params_of(kind))
    step, params = 1e-3, params_of(kind)
    table = params["embed"]["tokens"]
    moved = [
        loss({**params, "embed": {**params["embed"], "tokens": table + sign * step * (table > 0)}})
        for sign in (1, -1)
    ]
    wanted = (moved[0] - moved[1]) / (2 * step)
    assert wanted != 0
    found = (np.asarray(slopes["embed"]["tokens"]) * (table > 0)).sum()
    assert abs(found - wanted) <= 2e-3 * abs(wanted)
    late = slopes["decoder"]["block_1"]
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(late)), (
        "the captured value does not depend on later blocks"
    )


# Edits


def edits(names: list[str], strengths: jax.Array) -> dict:
    """Return an edit of each place with its own strength; a strength of 0 changes nothing."""

    def edit(name: str, strength: jax.Array):
        # with a cache there are more keys, so the change must not depend on the key axis
        change = jnp.square if name.endswith("/weights") else tilted
        return lambda x: x + strength.astype(x.dtype) * (change(x) - x)

    return {name: edit(name, strengths[i]) for i, name in enumerate(names)}


@pytest.mark.slow
@pytest.mark.long_except("encoder", "post-norm, GLU, T5")
@pytest.mark.parametrize("kind", KINDS)
def test_edits_match_in_looped_and_scanned_stacks(kind):
    """Edit one place at a time, with a single program mapped over the places."""
    names, plain, found = editable(kind), run(kind)[0], []
    for scanned in (False, True):
        each = jax.vmap(
            lambda s, scanned=scanned: run(kind, scanned=scanned, edit=edits(names, s))[0]
        )
        found.append(np.asarray(each(jnp.eye(len(names)))))
    for name, looped, scanned in zip(names, *found, strict=True):
        assert_near(scanned, looped, NEAR, name)
        assert np.abs(looped - plain).max() > 1e-3, f"{name} changes nothing"


@pytest.mark.slow
def test_editing_one_block_does_not_affect_others():
    names = ("block_0/residual", "block_1/residual")
    plain = run("decoder", capture=names)[2]
    for scanned in (False, True):
        edited = run("decoder", scanned=scanned, capture=names, edit={"block_1/residual": tilted})[
            2
        ]
        assert_near(edited[names[0]], plain[names[0]], NEAR)
        assert_near(edited[names[1]], tilted(plain[names[1]]), NEAR)


@pytest.mark.slow
@pytest.mark.long_except("decoder-False", "sandwich, Shaw-False")
@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder", "sandwich, Shaw"])
def test_edits_during_cached_decode_match_full_forward(kind, scanned):
    """Edit one place at a time while decoding token by token, mapped over the places."""
    config = config_of(kind, scan_layers=scanned)
    model, params = build(config), params_of(kind)
    variables = {"params": stack_layers(params) if scanned else params}
    tokens, source, names = draw(T), draw(S, 5), editable(kind)
    crossed = config.kind == "encoder-decoder"

    def full(strengths):
        more = dict(source=source) if crossed else {}
        return model.edited(edits(names, strengths)).apply(variables, tokens, **more)[0]

    def cached(strengths):
        edited = model.edited(edits(names, strengths))
        if crossed:
            state = edited.apply(variables, source, capacity=T, method="init_cache")
        else:
            state = init_cache(config, B, T)

        def read(state, token):
            logits, state = edited.apply(variables, token[:, None], cache=state)
            return state, logits[:, 0]

        return jax.lax.scan(read, state, tokens.T)[1].swapaxes(0, 1)

    which = jnp.eye(len(names))
    wanted, found = (np.asarray(jax.jit(jax.vmap(f))(which)) for f in (full, cached))
    for name, x, y in zip(names, found, wanted, strict=True):
        assert_near(x, y, 2 * NEAR, name)


@pytest.mark.slow
def test_edit_is_differentiable_with_respect_to_closed_over_value():
    """Compare the gradient of a traced strength with differences, and map over strengths."""
    rng = np.random.default_rng(3)
    direction = rng.standard_normal(14).astype(np.float32)
    weights = rng.standard_normal((B, T, VOCAB)).astype(np.float32)
    params = params_of("decoder")

    @jax.jit
    def loss(strength):
        edit = {"block_0/residual": lambda x: x + strength * direction[None, None]}
        return (run("decoder", params=params, edit=edit)[0] * weights).sum()

    slope = jax.grad(loss)(0.3)
    wanted = (loss(0.302) - loss(0.298)) / 0.004
    assert abs(slope - wanted) <= 1e-2 * abs(wanted) and abs(wanted) > 1
    mapped = jax.vmap(loss)(jnp.array([0.3, -0.5]))
    assert_near(mapped, np.array([loss(0.3), loss(-0.5)]), NEAR)


@pytest.mark.slow
@pytest.mark.long_except("attention")
@pytest.mark.parametrize("remat", ["none", "full", "dots", "attention"])
def test_identity_edit_changes_nothing_in_any_remat_mode(remat):
    """Logits and gradients do not change."""
    for scanned in (False, True):
        config = config_of("decoder", scan_layers=scanned, remat=remat)
        params = params_of("decoder")
        params = stack_layers(params) if scanned else params
        edit = {name: lambda x: x for name in editable("decoder")}

        def loss(params, config=config, edit=NOTHING, capture=()):
            model = build(config).edited(edit)
            out = model.apply({"params": params}, draw(T), capture=capture)
            return (out[0] ** 2).mean(), out[2:]

        names = ("block_1/attention/weights", "block_0/residual")
        (plain, _), slopes = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        both = partial(loss, edit=edit, capture=names)
        (edited, seen), found = jax.jit(jax.value_and_grad(both, has_aux=True))(params)
        assert set(seen[0]) == set(names)
        assert_near(edited, plain, NEAR)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(slopes), strict=True):
            assert_near(x, y, 10 * GRADIENT_F32)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["weights", "heads", "query", "value"])
def test_edit_does_not_change_dropped_weights(place):
    config, key = config_of("decoder", attention_dropout=0.4), jax.random.key(8)

    @jax.jit
    def read(params, key):
        model = build(config)
        edited = model.edited({f"block_*/attention/{place}": lambda x: x})
        return tuple(
            one.apply({"params": params}, draw(T), key=key)[0]
            for one, key in ((model, key), (edited, jax.random.clone(key)))
        )

    plain, edited = read(params_of("decoder"), key)
    assert_near(edited, plain, NEAR)
    assert np.abs(plain - run("decoder")[0]).max() > 0.1, "nothing is dropped"


class Sigmoid(Implementation):
    """Attention that weighs each visible key by the sigmoid of its score."""

    def refuse(self, call):
        return None

    def _weights(self, call):
        groups = call.query.shape[2] // call.key.shape[2]
        k = jnp.repeat(call.key, groups, axis=2)
        scores = jnp.einsum("BTNH,BSNH->BNTS", call.query, k) * call.key.shape[3] ** -0.5
        q, k = jnp.arange(scores.shape[2]), jnp.arange(scores.shape[3])
        seen = call.mask.materialize(q, k)
        return jnp.where(seen, jax.nn.sigmoid(scores), 0.0)

    def attend(self, call):
        v = jnp.repeat(call.value, call.query.shape[2] // call.value.shape[2], axis=2)
        return jnp.einsum("BNTS,BSNH->BTNH", self._weights(call), v), None


class OpenSigmoid(Sigmoid):
    def weights(self, call):
        return self._weights(call)


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, True])
def test_custom_attention_returns_weights_or_raises_error(monkeypatch, scanned):
    monkeypatch.setitem(IMPLEMENTATIONS, "open", OpenSigmoid())
    monkeypatch.setitem(IMPLEMENTATIONS, "closed", Sigmoid())
    place = "block_1/attention/weights"

    def read(name, edit=NOTHING, capture=()):
        config = config_of("decoder", scan_layers=scanned, implementation=name)
        params = params_of("decoder")
        params = stack_layers(params) if scanned else params
        model = build(config).edited(edit)
        return jax.jit(partial(model.apply, capture=capture))({"params": params}, draw(T))

    plain, _, captured = read("open", capture=(place,))
    assert np.abs(captured[place].sum(axis=-1) - 1).max() > 0.1, "rows of a softmax sum to 1"
    assert_near(read("open", edit={place: lambda x: x})[0], plain, NEAR)
    assert_near(read("closed")[0], plain, NEAR)
    for requested in (dict(capture=(place,)), dict(edit={place: lambda x: x})):
        with pytest.raises(NotImplementedError, match="the weights of Sigmoid are not known: give"):
            read("closed", **requested)


# Generation


@pytest.mark.slow
@pytest.mark.long_except("True")
@pytest.mark.parametrize("scanned", [False, True])
def test_edits_apply_to_generate_stream_and_beam_search(scanned):
    """Each generated token is the argmax of the edited model without a cache."""
    config = config_of("decoder", scan_layers=scanned)
    params = params_of("decoder")
    params = stack_layers(params) if scanned else params
    model, prompt = build(config), draw(3)
    edit = {"block_0/attention/heads": tilted, "block_1/residual": lambda x: -x}
    step, plain = make_step(model.edited(edit)), make_step(model)
    state = partial(init_cache, config, B, 9)
    made = generate(step, params, prompt, state(), num_tokens=5).tokens
    tokens = np.concatenate([prompt, made], axis=1)
    whole = jax.jit(model.edited(edit).apply)({"params": params}, tokens)[0]
    np.testing.assert_array_equal(made, np.argmax(whole[:, 2:-1], axis=-1))
    unedited = generate(plain, params, prompt, state(), num_tokens=5).tokens
    assert (np.asarray(unedited) != made).any(), "the edit changes nothing"
    streamed = list(stream(step, params, prompt, state(), num_tokens=5))
    np.testing.assert_array_equal(np.stack(streamed, 1), made)
    beams = beam_search(step, params, prompt, state(), num_tokens=5, num_beams=1)
    np.testing.assert_array_equal(np.asarray(beams.tokens)[:, 0], made)


@pytest.mark.slow
def test_edit_that_reads_global_is_retraced_after_change():
    config, params, prompt = config_of("decoder"), params_of("decoder"), draw(3)
    strength = np.float32([0.0])
    step = make_step(build(config).edited({"block_1/residual": lambda x: x * (1 - strength[0])}))
    found = []
    for strength[0] in (0.0, 2.0):
        state = init_cache(config, B, 9)
        found.append(np.asarray(generate(step, params, prompt, state, num_tokens=5).tokens))
    assert (found[0] != found[1]).any()


@pytest.mark.slow
def test_values_captured_in_generation_match_full_forward():
    config, params = config_of("decoder"), params_of("decoder")
    model, prompt = build(config), draw(3)
    names = ("block_0/residual", "block_1/attention/heads", "logits")
    made = generate(
        make_step(model), params, prompt, init_cache(config, B, 9), num_tokens=5, capture=names
    )
    tokens = np.concatenate([prompt, made.tokens[:, :-1]], axis=1)
    captured = model.apply({"params": params}, tokens, capture=names)[2]
    for name in names:
        assert_near(made.captured[name], captured[name][:, 2:], NEAR, name)


# Errors


@pytest.mark.slow_except(
    "requested2-capture is 'logits*",
    "requested5-edit\\\\['logits'\\\\] is 3.0: must be a function",
    "requested6-edit is of type list: must be a dict", "requested8-can only be captured",
    "*float64*",
)  # fmt: skip
@pytest.mark.parametrize(
    ("requested", "message"),
    [
        (dict(capture=("block_2/residual",)), "no place is named 'block_2/residual': .*did"),
        (dict(capture=("block_*/heads",)), r"no place is named 'block_\*/heads'"),
        (dict(capture="logits"), r"capture is 'logits': must be a tuple of place names, such as"),
        (dict(capture=(3,)), "3 is not the name of a place"),
        (dict(edit={"block_0/residal": tilted}), "did you mean block_0/residual"),
        (dict(edit={"logits": 3.0}), r"edit\['logits'\] is 3.0: must be a function"),
        (dict(edit=[tilted]), "edit is of type list: must be a dict"),
        (dict(edit={"block_*/residual": tilted, "block_1/residual": tilted}),
         "block_1/residual twice"),
        (dict(edit={"block_0/attention/key_positions": tilted}), "can only be captured"),
        (dict(edit={"block_0/residual": lambda x: x[:, :3]}),
         r"returns float32\[2, 3, 14\]: must be"),
        (dict(edit={"logits": lambda x: x.astype(jnp.bfloat16)}), "returns bfloat16"),
        (dict(edit={"logits": lambda x: None}), r"edit of logits returns None: must be float32\["),
        (dict(capture=("encoder/embedding",)), "no place is named 'encoder/embedding'"),
        (dict(edit={"logits": np.zeros((2, 3))}), r"edit\['logits'\] is float64\[2,3\]: must be a"),
    ],
)  # fmt: skip
def test_invalid_capture_or_edit_raises_error(requested, message):
    with pytest.raises(ValueError, match=message):
        run("decoder", **requested)


WRONG = {
    "float32": lambda x: x[:1],
    "None": lambda x: None,
    "an object of type dict": lambda x: {"x": x},
}


@pytest.mark.slow_except("*-True-float32", "decoder-block_1/*-False-*")
@pytest.mark.parametrize("returned", WRONG)
@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize(
    ("kind", "given", "place"),
    [
        ("decoder", "block_1/residual", "block_1/residual"),
        ("decoder", "block_*/attention/heads", "block_0/attention/heads"),
        ("encoder", "block_1/feed_forward/hidden", "block_1/feed_forward/hidden"),
        ("encoder-decoder", "encoder/block_1/residual", "encoder/block_1/residual"),
        ("encoder-decoder", "encoder/final_norm", "encoder/final_norm"),
        ("encoder-decoder", "block_1/cross_attention/query", "block_1/cross_attention/query"),
    ],
)
def test_edit_with_wrong_shape_error_names_place(scanned, kind, given, place, returned):
    """The error contains the name as passed to `edited`, including block and stack."""
    config = config_of(kind, scan_layers=scanned)
    more = dict(source=draw(S, 5)) if config.kind == "encoder-decoder" else {}

    def apply(params):
        params = stack_layers(params) if scanned else params
        edit = {given: WRONG[returned]}
        return build(config).edited(edit).apply({"params": params}, draw(T), **more)

    with pytest.raises(ValueError, match=f"^edit of {place} returns {returned}.*: must be fl"):
        jax.eval_shape(apply, params_of(kind))


@pytest.mark.slow
def test_encoder_places_require_source():
    config = config_of("encoder-decoder")
    variables = {"params": params_of("encoder-decoder")}
    state = build(config).apply(variables, draw(S, 5), capacity=T, method="init_cache")
    with pytest.raises(
        ValueError, match="encoder/embedding is not available with a cache: its source was read"
    ):
        build(config).apply(variables, draw(T), cache=state, capture=("encoder/embedding",))


@pytest.mark.slow
def test_program_without_captures_is_unchanged():
    for scanned in (False, True):
        config = config_of("decoder", scan_layers=scanned)
        params = params_of("decoder")
        params = stack_layers(params) if scanned else params
        programs = [
            str(jax.make_jaxpr(lambda p: model.apply({"params": p}, draw(T), capture=()))(params))  # noqa: B023
            for model in (build(config), build(config).edited({}))
        ]
        assert programs[0] == programs[1]
