"""Tests of captures and edits in the models of the lectures and in streaming encoders."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.tolerances import FORWARD_F32, assert_near
from transformer_jax import places
from transformer_jax.config import (
    ConvolutionConfig,
    ModelConfig,
    NgramConfig,
    RecurrentConfig,
    WindowConfig,
)
from transformer_jax.decoding.generation import generate
from transformer_jax.decoding.step import make_step
from transformer_jax.lectures.ngram import count_ngrams
from transformer_jax.lectures.recent_tokens import init_recent_tokens
from transformer_jax.lectures.recurrent import init_recurrent_state
from transformer_jax.models.factory import build, init_cache, init_params
from transformer_jax.models.streaming import StreamingEncoder

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB, E, H, B, T, S = 13, 5, 7, 2, 6, 4
NEAR = 5 * FORWARD_F32
LM = partial(RecurrentConfig, vocab_size=VOCAB, d_embed=E, d_hidden=H, init_std=0.7)
CONFIGS = {
    "rnn": LM(cell="rnn"),
    "lstm": LM(cell="lstm", num_layers=2),
    "gru, additive": LM(cell="gru", source_vocab_size=VOCAB, attention="additive", d_attention=3),
    "lstm, general, state": LM(
        cell="lstm", source_vocab_size=VOCAB, attention="general", context="state",
        bidirectional=True, num_layers=2,
    ),
    "rnn, dot": LM(cell="rnn", source_vocab_size=VOCAB, attention="dot"),
    "tagger": LM(cell="gru", bidirectional=True, num_layers=2),
    "window": WindowConfig(
        vocab_size=VOCAB, context=3, d_embed=E, d_hidden=H, num_layers=2, direct=True, init_std=0.7
    ),
    "convolution": ConvolutionConfig(vocab_size=VOCAB, d_hidden=H, num_layers=2, init_std=0.7),
    "ngram": NgramConfig(vocab_size=VOCAB, order=2),
    "streaming": ModelConfig(
        d_model=14, num_layers=2, num_heads=2, head_dim=6, d_ff=11, window=3, positions="rope",
        init_std=0.3,
    ),
}  # fmt: skip
WITHOUT_STATE = {"tagger"}


def draw(columns: int, seed: int = 17) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (B, columns), dtype=np.int32)


def frames() -> np.ndarray:
    return np.random.default_rng(3).standard_normal((B, T, E)).astype(np.float32)


@cache
def model_and_params(kind: str):
    """Return a model and its parameters."""
    config = CONFIGS[kind]
    if kind == "ngram":
        config, params = count_ngrams(config, draw(40, 5))
        return build(config), params
    if kind == "streaming":
        model = StreamingEncoder(config, E)
        params = model.init(jax.random.key(3), frames())["params"]
    else:
        model, params = build(config), init_params(config, jax.random.key(3))
    rng = np.random.default_rng(7)  # so that biases and norms differ from 0 and 1
    return model, jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape, np.float32), params)


def places_of(kind: str) -> dict:
    model, _ = model_and_params(kind)
    return places(model if kind == "streaming" else model.config)


def has_source(kind: str) -> bool:
    return getattr(CONFIGS[kind], "source_vocab_size", None) is not None


def run(kind: str, params=None, edit=None, **options):
    model, default = model_and_params(kind)
    model = model if edit is None else model.edited(edit)
    more = dict(source=draw(S, 5)) if has_source(kind) else {}
    tokens = frames() if kind == "streaming" else draw(T)
    apply = jax.jit(partial(model.apply, **options))
    return apply({"params": default if params is None else params}, tokens, **more)


def begin(kind: str, model=None):
    """Return the initial state."""
    plain, params = model_and_params(kind)
    model = plain if model is None else model
    if has_source(kind):
        return model.apply({"params": params}, draw(S, 5), method="init_state")
    if kind == "streaming":
        return init_cache(model.config, B, 3)
    if kind in ("convolution", "window", "ngram"):
        return init_recent_tokens(model.config, B)
    return init_recurrent_state(model.config, B)


def tilted(value: jax.Array) -> jax.Array:
    ramp = jnp.arange(value.shape[-1], dtype=value.dtype) / value.shape[-1]
    return value * 0.9 + 0.3 * ramp.reshape((1,) * (value.ndim - 1) + (-1,))


def edits(names: list[str], strengths: jax.Array) -> dict:
    """Return an edit of every place with a strength; strength 0 changes nothing."""

    def edit(name: str, strength: jax.Array):
        change = jnp.square if name.endswith("/weights") else tilted
        return lambda x: x + strength.astype(x.dtype) * (change(x) - x)

    return {name: edit(name, strengths[i]) for i, name in enumerate(names)}


@pytest.mark.long_except(
    "gru, additive", "lstm, general, state", "rnn, dot", "tagger", "window", "ngram", "streaming"
)
@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_captured_places_have_documented_shapes_without_side_effects(kind):
    names = places_of(kind)
    *results, captured = run(kind, capture=tuple(names))
    assert set(captured) == set(names)  # jit sorts the names
    for name, shape in names.items():
        inside = name.startswith("encoder/")
        source = name == "attention/weights"  # the keys are those of the source
        sizes = {"B": B, "T": S if inside else T, "S": S if source else T}
        assert captured[name].shape == tuple(sizes.get(n, n) for n in shape), name
        assert np.isfinite(captured[name]).all() and np.abs(captured[name]).max() > 0, name
    assert_near(results[0], run(kind)[0], NEAR)
    if "logits" in names:
        assert_near(captured["logits"], results[0], NEAR)


def exact(x) -> np.ndarray:
    return np.asarray(x, np.float64)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.slow
def test_captured_values_match_formulas():
    """Compute each value in float64 from the captured values before it."""
    captured = {k: exact(v) for k, v in run("rnn", capture=("*", "layer_*/*"))[2].items()}
    cell = jax.tree.map(exact, model_and_params("rnn")[1]["decoder"]["cell_0"])
    x, h = captured["embedding"], captured["layer_0/hidden"]
    before = np.pad(h, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    w, u = cell["i"], cell["h"]
    assert_near(h, np.tanh(x @ w["kernel"] + w["bias"] + before @ u["kernel"]), NEAR)
    assert_near(captured["read_out"], h, NEAR)

    captured = {k: exact(v) for k, v in run("lstm", capture=("*", "layer_*/*"))[2].items()}
    cell = jax.tree.map(exact, model_and_params("lstm")[1]["decoder"]["cell_1"])
    x, h, c = (captured[n] for n in ("layer_0/hidden", "layer_1/hidden", "layer_1/cell"))
    h_before, c_before = (np.pad(y, ((0, 0), (1, 0), (0, 0)))[:, :-1] for y in (h, c))
    gate = lambda n: (  # noqa: E731
        x @ cell[f"i{n}"]["kernel"] + h_before @ cell[f"h{n}"]["kernel"] + cell[f"h{n}"]["bias"]
    )
    new = sigmoid(gate("f")) * c_before + sigmoid(gate("i")) * np.tanh(gate("g"))
    assert_near(c, new, NEAR)
    assert_near(h, sigmoid(gate("o")) * np.tanh(new), NEAR)

    names = ("attention/*", "encoder/layer_0/output", "layer_0/hidden", "read_out", "logits")
    captured = {k: exact(v) for k, v in run("rnn, dot", capture=names)[2].items()}
    memory, h = captured["encoder/layer_0/output"], captured["layer_0/hidden"]
    scores = np.exp(np.einsum("bth,bsh->bts", h, memory))
    assert_near(captured["attention/weights"], scores / scores.sum(-1, keepdims=True), NEAR)
    context = np.einsum("bts,bsm->btm", captured["attention/weights"], memory)
    assert_near(captured["attention/context"], context, NEAR)
    params = jax.tree.map(exact, model_and_params("rnn, dot")[1])
    combined = np.concatenate([context, h], -1) @ params["decoder"]["read_out"]["kernel"]
    assert_near(captured["read_out"], np.tanh(combined), NEAR)
    logits = np.tanh(combined) @ params["embed"]["output"].T + params["embed"]["bias"]
    assert_near(captured["logits"], logits, NEAR)

    captured = {k: exact(v) for k, v in run("window", capture=("*", "layer_*/*"))[2].items()}
    layer = jax.tree.map(exact, model_and_params("window")[1]["hidden_0"])
    hidden = np.tanh(captured["embedding"] @ layer["kernel"] + layer["bias"])
    assert_near(captured["layer_0/hidden"], hidden, NEAR)


@pytest.mark.long_except(
    "gru, additive", "lstm, general, state", "rnn, dot", "window", "ngram", "streaming"
)
@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind not in WITHOUT_STATE])
def test_edits_with_decoding_state_match_full_forward(kind):
    """Edit one place at a time, token by token; `vmap` maps over the edited place."""
    model, params = model_and_params(kind)
    names = [name for name in places_of(kind) if not name.endswith("key_positions")]
    variables, plain = {"params": params}, run(kind)[0]
    tokens = frames() if kind == "streaming" else draw(T)
    state_argument = "cache" if kind == "streaming" else "state"

    def full(strengths):
        more = dict(source=draw(S, 5)) if has_source(kind) else {}
        return model.edited(edits(names, strengths)).apply(variables, tokens, **more)[0]

    def in_steps(strengths):
        edited = model.edited(edits(names, strengths))
        state = begin(kind, edited)

        def read(state, token):
            out, state = edited.apply(variables, token[:, None], **{state_argument: state})
            return state, out[:, 0]

        return jax.lax.scan(read, state, tokens.swapaxes(0, 1))[1].swapaxes(0, 1)

    which = jnp.eye(len(names))
    wanted, found = (np.asarray(jax.jit(jax.vmap(f))(which)) for f in (full, in_steps))
    for name, x, y in zip(names, found, wanted, strict=True):
        assert_near(x, y, 2 * NEAR, name)
        last = CONFIGS[kind]
        unread = name == f"layer_{getattr(last, 'num_layers', 0) - 1}/cell" and T == 1
        assert unread or np.abs(y - plain).max() > 1e-4, f"{name} changes nothing"


@pytest.mark.slow
def test_tagger_can_be_edited_at_every_place():
    names, plain = list(places_of("tagger")), run("tagger")[0]
    found = jax.vmap(lambda s: run("tagger", edit=edits(names, s))[0])(jnp.eye(len(names)))
    for name, logits in zip(names, np.asarray(found), strict=True):
        assert np.abs(logits - plain).max() > 1e-3, f"{name} changes nothing"


@pytest.mark.slow
def test_captured_state_has_correct_gradient():
    """Compare with finite differences; the second layer has no gradient."""

    def loss(strength, params=None):
        edit = {"embedding": lambda x: x + strength}
        captured = run("lstm", params, capture=("layer_0/hidden",), edit=edit)[2]
        return (captured["layer_0/hidden"] ** 2).sum()

    slope, wanted = jax.grad(loss)(0.3), (loss(0.302) - loss(0.298)) / 0.004
    assert abs(slope - wanted) <= 1e-2 * abs(wanted) and abs(wanted) > 1e-2
    slopes = jax.grad(loss, argnums=1)(0.3, model_and_params("lstm")[1])["decoder"]
    assert any(np.asarray(x).any() for x in jax.tree.leaves(slopes["cell_0"]))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(slopes["cell_1"]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lstm", "rnn, dot", "window", "ngram"])
def test_edits_and_captures_in_generation_match_full_forward(kind):
    """Each token is the argmax of the edited model's full pass."""
    model, params = model_and_params(kind)
    place = "logits" if kind == "ngram" else "layer_0/hidden"
    edit, prompt = {place: lambda x: -x}, draw(3)
    step, more = make_step(model.edited(edit)), dict(source=draw(S, 5)) if has_source(kind) else {}
    result = generate(step, params, prompt, begin(kind), num_tokens=4, capture=(place, "logits"))
    tokens = np.concatenate([prompt, result.tokens], axis=1)
    apply = jax.jit(partial(model.edited(edit).apply, capture=(place, "logits")))
    logits, _, captured = apply({"params": params}, tokens[:, :-1], **more)
    np.testing.assert_array_equal(result.tokens, np.argmax(logits[:, 2:], axis=-1))
    for name, value in captured.items():
        assert_near(result.captured[name], value[:, 2:], NEAR, name)
    plain = generate(make_step(model), params, prompt, begin(kind), num_tokens=4).tokens
    assert (np.asarray(plain) != result.tokens).any(), "the edit changes nothing"


@pytest.mark.slow
def test_unknown_place_is_rejected():
    for kind, options, message in (
        ("lstm", dict(capture=("layer_2/hidden",)), "no place is named 'layer_2/hidden': "),
        ("rnn", dict(capture=("layer_0/cell",)), "no place is named 'layer_0/cell'"),
        ("rnn", dict(edit={"layer_0/hidden": lambda x: x[..., :2]}), "edit of layer_0/hidden"),
        ("window", dict(edit={"block_0/residual": jnp.square}), "no place is named 'block_0"),
        ("ngram", dict(capture=("embedding",)), "no place is named 'embedding'"),
        ("streaming", dict(capture=("logits",)), "no place is named 'logits'"),
    ):
        with pytest.raises(ValueError, match=message):
            run(kind, **options)
    model, params = model_and_params("rnn, dot")
    with pytest.raises(ValueError, match="encoder/embedding needs a source: a state already"):
        model.apply(
            {"params": params}, draw(T), state=begin("rnn, dot"), capture=("encoder/embedding",)
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_program_is_unchanged_without_captures_or_edits(kind):
    model, params = model_and_params(kind)
    more = dict(source=draw(S, 5)) if has_source(kind) else {}
    tokens = frames() if kind == "streaming" else draw(T)

    def program(model=model, **options):
        apply = lambda p: model.apply({"params": p}, tokens, **more, **options)[0]  # noqa: E731
        return str(jax.make_jaxpr(apply)(params))

    plain = program()
    assert program(model.edited({}), capture=()) == plain
    name = "logits" if kind in ("convolution", "ngram") else "embedding"
    assert program(capture=(name,)) == plain  # the captured value is computed anyway, and unused
