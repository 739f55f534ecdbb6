"""Look inside models before transformers and encoders of streams, and change them."""

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
def made(kind: str):
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
    rng = np.random.default_rng(7)  # biases and norms that are not 0 and 1
    return model, jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape, np.float32), params)


def known(kind: str) -> dict:
    model, _ = made(kind)
    return places(model if kind == "streaming" else model.config)


def has_source(kind: str) -> bool:
    return getattr(CONFIGS[kind], "source_vocab_size", None) is not None


def run(kind: str, params=None, **asked):
    model, own = made(kind)
    more = dict(source=draw(S, 5)) if has_source(kind) else {}
    tokens = frames() if kind == "streaming" else draw(T)
    apply = jax.jit(partial(model.apply, **asked))
    return apply({"params": own if params is None else params}, tokens, **more)


def begin(kind: str, model=None):
    """Return the state before any token."""
    plain, params = made(kind)
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
    """An edit of every place, each as strong as its own number says: 0 changes nothing."""

    def edit(name: str, strength: jax.Array):
        change = jnp.square if name.endswith("/weights") else tilted
        return lambda x: x + strength.astype(x.dtype) * (change(x) - x)

    return {name: edit(name, strengths[i]) for i, name in enumerate(names)}


@pytest.mark.long_except(
    "gru, additive", "lstm, general, state", "rnn, dot", "tagger", "window", "ngram", "streaming"
)
@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_place_has_its_shape_and_changes_nothing_by_being_looked_at(kind):
    names = known(kind)
    *results, captured = run(kind, capture=tuple(names))
    assert set(captured) == set(names)  # jit sorts the names
    for name, shape in names.items():
        inside = name.startswith("encoder/")
        source = name == "attention/weights"  # its keys are the source's
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
def test_states_and_weights_are_those_of_the_formulas():
    """Each from what is captured before it, in float64."""
    captured = {k: exact(v) for k, v in run("rnn", capture=("*", "layer_*/*"))[2].items()}
    cell = jax.tree.map(exact, made("rnn")[1]["decoder"]["cell_0"])
    x, h = captured["embedding"], captured["layer_0/hidden"]
    before = np.pad(h, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    w, u = cell["i"], cell["h"]
    assert_near(h, np.tanh(x @ w["kernel"] + w["bias"] + before @ u["kernel"]), NEAR)
    assert_near(captured["read_out"], h, NEAR)

    captured = {k: exact(v) for k, v in run("lstm", capture=("*", "layer_*/*"))[2].items()}
    cell = jax.tree.map(exact, made("lstm")[1]["decoder"]["cell_1"])
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
    params = jax.tree.map(exact, made("rnn, dot")[1])
    combined = np.concatenate([context, h], -1) @ params["decoder"]["read_out"]["kernel"]
    assert_near(captured["read_out"], np.tanh(combined), NEAR)
    logits = np.tanh(combined) @ params["embed"]["output"].T + params["embed"]["bias"]
    assert_near(captured["logits"], logits, NEAR)

    captured = {k: exact(v) for k, v in run("window", capture=("*", "layer_*/*"))[2].items()}
    layer = jax.tree.map(exact, made("window")[1]["hidden_0"])
    hidden = np.tanh(captured["embedding"] @ layer["kernel"] + layer["bias"])
    assert_near(captured["layer_0/hidden"], hidden, NEAR)


@pytest.mark.long_except(
    "gru, additive", "lstm, general, state", "rnn, dot", "window", "ngram", "streaming"
)
@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind not in WITHOUT_STATE])
def test_an_edit_under_a_state_is_the_edit_of_the_full_pass(kind):
    """Token after token, of every place by itself: programs for all, mapped over which it is."""
    model, params = made(kind)
    names = [name for name in known(kind) if not name.endswith("key_positions")]
    variables, plain = {"params": params}, run(kind)[0]
    tokens = frames() if kind == "streaming" else draw(T)
    holds = "cache" if kind == "streaming" else "state"

    def full(strengths):
        more = dict(source=draw(S, 5)) if has_source(kind) else {}
        return model.apply(variables, tokens, edit=edits(names, strengths), **more)[0]

    def in_steps(strengths):
        edited = model.edited(edits(names, strengths))
        state = begin(kind, edited)

        def read(state, token):
            out, state = edited.apply(variables, token[:, None], **{holds: state})
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
def test_a_tagger_is_edited_at_every_place():
    names, plain = list(known("tagger")), run("tagger")[0]
    found = jax.vmap(lambda s: run("tagger", edit=edits(names, s))[0])(jnp.eye(len(names)))
    for name, logits in zip(names, np.asarray(found), strict=True):
        assert np.abs(logits - plain).max() > 1e-3, f"{name} changes nothing"


@pytest.mark.slow
def test_a_captured_state_has_a_gradient():
    """Its slope in what an edit adds, by differences; the second layer is not on its way."""

    def loss(strength, params=None):
        edit = {"embedding": lambda x: x + strength}
        captured = run("lstm", params, capture=("layer_0/hidden",), edit=edit)[2]
        return (captured["layer_0/hidden"] ** 2).sum()

    slope, wanted = jax.grad(loss)(0.3), (loss(0.302) - loss(0.298)) / 0.004
    assert abs(slope - wanted) <= 1e-2 * abs(wanted) and abs(wanted) > 1e-2
    slopes = jax.grad(loss, argnums=1)(0.3, made("lstm")[1])["decoder"]
    assert any(np.asarray(x).any() for x in jax.tree.leaves(slopes["cell_0"]))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(slopes["cell_1"]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lstm", "rnn, dot", "window", "ngram"])
def test_generation_is_edited_and_captured_as_the_model_is(kind):
    """Each token is the likeliest after those before it, by the edited model in one pass."""
    model, params = made(kind)
    place = "logits" if kind == "ngram" else "layer_0/hidden"
    edit, prompt = {place: lambda x: -x}, draw(3)
    step, more = make_step(model, edit=edit), dict(source=draw(S, 5)) if has_source(kind) else {}
    made_by = generate(step, params, prompt, begin(kind), num_tokens=4, capture=(place, "logits"))
    tokens = np.concatenate([prompt, made_by.tokens], axis=1)
    apply = jax.jit(partial(model.apply, edit=edit, capture=(place, "logits")))
    logits, _, captured = apply({"params": params}, tokens[:, :-1], **more)
    np.testing.assert_array_equal(made_by.tokens, np.argmax(logits[:, 2:], axis=-1))
    for name, value in captured.items():
        assert_near(made_by.captured[name], value[:, 2:], NEAR, name)
    plain = generate(make_step(model), params, prompt, begin(kind), num_tokens=4).tokens
    assert (np.asarray(plain) != made_by.tokens).any(), "the edit changes nothing"


@pytest.mark.slow
def test_what_is_no_place_is_refused_by_name():
    for kind, asked, message in (
        ("lstm", dict(capture=("layer_2/hidden",)), "no place is named 'layer_2/hidden', nearest"),
        ("rnn", dict(capture=("layer_0/cell",)), "no place is named 'layer_0/cell'"),
        ("rnn", dict(edit={"layer_0/hidden": lambda x: x[..., :2]}), "edit of layer_0/hidden"),
        ("window", dict(edit={"block_0/residual": jnp.square}), "no place is named 'block_0"),
        ("ngram", dict(capture=("embedding",)), "no place is named 'embedding'"),
        ("streaming", dict(capture=("logits",)), "no place is named 'logits'"),
    ):
        with pytest.raises(ValueError, match=message):
            run(kind, **asked)
    model, params = made("rnn, dot")
    for asked in (
        dict(capture=("encoder/embedding",)), dict(edit={"encoder/embedding": jnp.square})
    ):  # fmt: skip
        with pytest.raises(ValueError, match="encoder/embedding with a state: it has already"):
            model.apply({"params": params}, draw(T), state=begin("rnn, dot"), **asked)
    with pytest.raises(ValueError, match="encoder/embedding in a step"):
        make_step(model, edit={"encoder/embedding": jnp.square})


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_where_nothing_is_asked_for_the_program_is_the_same(kind):
    model, params = made(kind)
    more = dict(source=draw(S, 5)) if has_source(kind) else {}
    tokens = frames() if kind == "streaming" else draw(T)

    def program(**asked):
        return str(
            jax.make_jaxpr(lambda p: model.apply({"params": p}, tokens, **more, **asked)[0])(params)
        )

    plain = program()
    assert program(capture=(), edit={}) == plain
    name = "logits" if kind in ("convolution", "ngram") else "embedding"
    assert program(capture=(name,)) == plain  # its value is there, and is not returned here
