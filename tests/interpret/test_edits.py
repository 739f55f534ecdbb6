"""Edits against modified weights, means, values of another run, and sums."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.interpret.tiny import B, D, T, draw, model_of, params_of
from tests.support.tolerances import FORWARD_F32, assert_near
from transformer_jax.config import ModelConfig
from transformer_jax.decoding.generation import generate, prefill
from transformer_jax.decoding.step import make_step
from transformer_jax.interpret import add, mean, resample, zero
from transformer_jax.models.editing import Call
from transformer_jax.models.factory import build, init_cache, init_decode_state, init_params
from transformer_jax.models.places import places
from transformer_jax.models.stack import stack_layers

pytestmark = pytest.mark.usefixtures("quick_compilation")
NEAR = 5 * FORWARD_F32


def run(shape, scanned=False, params=None, tokens=None, edit=None, **requested):
    model, own = model_of(shape, scanned=scanned)
    model = model if edit is None else model.edited(edit)
    params = own if params is None else params
    tokens = draw() if tokens is None else tokens
    return jax.jit(partial(model.apply, **requested))({"params": params}, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_zeroed_head_matches_zeroed_output_rows(shape, scanned):
    found = run(shape, scanned, edit=zero("block_1/attention/heads", heads=(0, 2)))[0]
    params = jax.tree.map(np.copy, params_of(shape))
    params["decoder"]["block_1"]["attention"]["out"]["kernel"][[0, 2]] = 0
    wanted = run(shape, scanned, stack_layers(params) if scanned else params)[0]
    assert_near(found, wanted, NEAR)
    assert np.abs(found - run(shape)[0]).max() > 1e-2


@pytest.mark.slow
def test_zeroed_feed_forward_matches_zeroed_last_matrix():
    found = run("gpt2", edit=zero("block_*/feed_forward/output"))[0]
    params = jax.tree.map(np.copy, params_of("gpt2"))
    for i in range(2):
        for leaf in params["decoder"][f"block_{i}"]["feed_forward"]["down"].values():
            leaf[:] = 0
    assert_near(found, run("gpt2", params=params)[0], NEAR)


@pytest.mark.slow_except("both")
@pytest.mark.parametrize("over", ["tokens", "rows", "both"])
def test_mean_edit_averages_over_tokens_in_call(over):
    name = "block_0/attention/heads"
    model, params = model_of("gpt2")
    edit = mean(name, over, heads=2, at=(1, 3))

    @jax.jit
    def both(params, tokens):
        return tuple(
            one.apply({"params": params}, tokens, capture=(name,))[2][name]
            for one in (model, model.edited(edit))
        )

    (own, edited), rest = jax.device_get(both(params, draw())), [0, 1, 3]
    axis = {"tokens": (1,), "rows": (0,), "both": (0, 1)}[over]
    whole = np.broadcast_to(np.asarray(own, np.float64).mean(axis, keepdims=True), own.shape)
    assert_near(edited[:, [1, 3], 2], whole[:, [1, 3], 2], NEAR)
    np.testing.assert_array_equal(edited[:, :, rest], own[:, :, rest])
    np.testing.assert_array_equal(edited[:, [0, 2, 4, 5, 6], 2], own[:, [0, 2, 4, 5, 6], 2])


@pytest.mark.parametrize("over", ["tokens", "rows", "both"])
@pytest.mark.parametrize("place", ["block_0/residual", "block_0/attention/heads", "*/weights"])
def test_value_edit_matches_numpy(place, over):
    """Includes attention weights [B, N, T, S], with other axes for tokens and heads."""
    shapes = {"block_0/residual": (B, T, D), "*/weights": (B, 3, T, 11)}
    value = np.random.default_rng(7).standard_normal(shapes.get(place, (B, T, 3, 5)))
    tokens = 2 if place == "*/weights" else 1
    axes = {"tokens": (tokens,), "rows": (0,), "both": (0, tokens)}[over]
    (edit,) = mean(place, over).values()
    whole = np.broadcast_to(value.mean(axes, keepdims=True), value.shape)
    assert_near(jax.jit(edit)(value.astype(np.float32)), whole, 1e-6)
    if place == "*/weights" or over != "tokens":
        return
    (edit,) = zero(place, at=(1, T - 1)).values()
    wanted = value.astype(np.float32)
    wanted[:, [1, T - 1]] = 0
    np.testing.assert_array_equal(jax.jit(edit)(value.astype(np.float32)), wanted)


@pytest.mark.slow
def test_resampling_every_place_reproduces_source_run():
    """Resample every place; then one token, which changes no other token before attention."""
    model, _ = model_of("llama")
    requested = tuple(x for x in places(model.config) if not x.endswith("key_positions"))
    other = run("llama", tokens=draw(3), capture=requested)
    assert_near(run("llama", edit=resample(other[2]))[0], other[0], NEAR)
    found = run("llama", edit=resample(other[2], at=2), capture=requested)[2]
    own = run("llama", capture=("embedding",))[2]["embedding"]
    for name in requested:
        axis = 2 if name.endswith("/weights") else 1
        edited, wanted = (np.moveaxis(np.asarray(x[name]), axis, 0) for x in (found, other[2]))
        np.testing.assert_array_equal(edited[2], wanted[2], name)
    rest = [0, 1, 3, 4, 5, 6]
    np.testing.assert_array_equal(found["embedding"][:, rest], own[:, rest])


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, True])
def test_steered_generation_matches_full_forward(scanned):
    model, params = model_of("gpt2", scanned=scanned)
    vector = np.random.default_rng(3).standard_normal(D).astype(np.float32)
    edit = add("block_0/residual", 5 * vector)
    cache = partial(init_cache, model.config, B, T + 5)
    made = generate(make_step(model.edited(edit)), params, draw(), cache(), num_tokens=5).tokens
    whole = np.concatenate([draw(), made], axis=1)
    logits = run("gpt2", scanned, tokens=whole, edit=edit)[0]
    np.testing.assert_array_equal(made, np.argmax(logits[:, T - 1 : -1], axis=-1))
    plain = generate(make_step(model), params, draw(), cache(), num_tokens=5).tokens
    assert (np.asarray(made) != plain).any()
    name = "block_0/residual"
    own = run("gpt2", scanned, capture=(name,))[2][name]
    at = run("gpt2", scanned, edit=add(name, vector, at=(0, 5)), capture=(name,))[2][name]
    wanted = np.asarray(own).copy()
    wanted[:, [0, 5]] += vector
    assert_near(at, wanted, NEAR)


@pytest.mark.slow
def test_edits_accept_traced_indices_and_differentiable_vectors():
    def loss(vector, at):
        edit = add("block_0/residual", vector, at=at) | zero("block_1/attention/heads", heads=at)
        return (run("gpt2", edit=edit)[0] ** 2).mean()

    zeros = jnp.zeros(D)
    slopes = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(zeros, jnp.arange(2))
    step = 1e-2 * np.eye(D, dtype=np.float32)[3]
    for at in range(2):
        wanted = (loss(step, at) - loss(-step, at)) / 2e-2
        assert abs(slopes[at, 3] - wanted) <= 1e-2 * np.abs(slopes[at]).max()


@pytest.mark.parametrize("name", ["heads", "at"])
def test_traced_index_out_of_range_produces_nan(name):
    value = np.ones((B, T, 4, 3), np.float32)

    @jax.jit
    def edited(index):
        return zero("block_0/attention/heads", **{name: index})["block_0/attention/heads"](value)

    size = dict(heads=4, at=T)[name]
    for index in (-1, size, np.array([0, size])):
        assert np.isnan(edited(index)).all()
    for index in (0, size - 1, np.array([0, size - 1])):
        found = np.asarray(edited(index))
        assert np.isfinite(found).all() and (found == 0).any()


def test_traced_index_is_relative_to_sequence_start():
    token, call = np.ones((B, 1, D), np.float32), Call(whole=False, starts=None, padded=None)

    @jax.jit
    def later(at, positions):  # a token that is read alone
        return zero("block_0/residual", at=at)["block_0/residual"](token, positions, call)

    for at, positions in ((5, [[5], [6]]), (0, [[0], [-1]]), (9, [[2], [3]])):
        wanted = np.where(np.array(positions)[..., None] == at, 0, token)
        np.testing.assert_array_equal(later(at, np.array(positions)), wanted)


@pytest.mark.slow_except("None")
@pytest.mark.parametrize("chunk", [None, 2])
def test_traced_token_index_past_row_end_makes_row_nan(chunk):
    """Rows of 5 and 3 tokens plus 4 new ones: no row reads token 8, one row reads token 7."""
    model, params = model_of("gpt2")
    vector, lengths = np.arange(D, dtype=np.float32), np.array([5, 3])

    @jax.jit
    @partial(jax.vmap, in_axes=(0, None))
    def made(at, tokens):
        step = make_step(model.edited(add("block_0/residual", vector, at=at)))
        cache = init_cache(model.config, B, T + 5)
        given = dict(lengths=lengths, num_tokens=4, chunk=chunk)
        found = generate(step, params, tokens, cache, **given)
        return found.tokens, found.log_probs

    tokens, log_probs = jax.device_get(made(np.array([2, 7, 8, -1]), draw()[:, :5]))
    wanted = np.array([[False, False], [False, True], [True, True], [True, True]])
    np.testing.assert_array_equal(np.isnan(log_probs), np.repeat(wanted[..., None], 4, axis=2))
    whole = np.append(draw()[0, :5], tokens[1, 0])
    right = run("gpt2", tokens=whole[None], edit=add("block_0/residual", vector, at=7))[0]
    right = np.asarray(jax.nn.log_softmax(right[0]))[np.arange(4, 8), whole[5:]]
    assert_near(log_probs[1, 0], right, NEAR)


def test_edit_over_tokens_requires_whole_prompt():
    model, params = model_of("gpt2")
    step = make_step(model.edited({"block_0/residual": lambda x: x - x.mean(1, keepdims=True)}))

    def read(chunk):
        given = draw()[:, :5], init_cache(model.config, B, T), np.array([5, 5])
        return jax.eval_shape(lambda: prefill(step, params, *given, chunk=chunk))[0].shape

    assert read(None) == read(5) == (B, model.config.vocab_size)
    with pytest.raises(ValueError, match="needs all tokens of a sequence, but this call reads"):
        read(2)


def test_token_index_may_be_outside_a_part_of_a_sequence():
    model, params = model_of("gpt2")
    model = model.edited(zero("block_0/residual", at=6))
    tokens = draw()[:, :5]
    jax.eval_shape(model.with_facts(part=True).apply, {"params": params}, tokens)
    with pytest.raises(ValueError, match="at is 6: must be from 0 to 4"):
        jax.eval_shape(model.apply, {"params": params}, tokens)


@pytest.mark.slow
def test_source_keys_and_values_are_indexed_by_source_tokens():
    """Token 5 exists in a source of 7 although the target has 3 tokens."""
    config = ModelConfig(
        kind="encoder-decoder", vocab_size=13, d_model=D, num_layers=1, num_heads=2, max_len=11
    )
    model, params = build(config), init_params(config, jax.random.key(0))
    place, source, target = "block_0/cross_attention/value", draw()[:1] % 13, draw()[:1, :2] % 13
    vector = np.arange(D // 2, dtype=np.float32)
    for edit in (add(place, vector, at=5), mean(place, "tokens")):
        state = init_decode_state(config, params, 1, 4, source=source)
        made = generate(make_step(model.edited(edit)), params, target, state, num_tokens=2)
        whole = np.append(target, made.tokens[:, :1], axis=1)
        logits = jax.jit(model.edited(edit).apply)({"params": params}, whole, source=source)
        right = np.asarray(jax.nn.log_softmax(logits[0]))[0, [1, 2], made.tokens[0]]
        assert_near(made.log_probs[0], right, NEAR)
    step = make_step(model.edited(add(place, vector, at=7))).with_facts(part=True)
    with pytest.raises(ValueError, match=r"at is 7: must be from 0 to 6"):
        jax.eval_shape(step, params, target[:, :1], state)


@pytest.mark.slow
def test_editing_one_row_in_padded_batch_does_not_affect_others():
    """The edit selects the row through `positions`."""
    model, params = model_of("gpt2")
    vector, lengths = np.arange(D, dtype=np.float32), np.array([5, 3])

    def made(edit):
        cache = init_cache(model.config, B, T + 5)
        step = make_step(model.edited({} if edit is None else {"block_0/residual": edit}))
        given = dict(lengths=lengths, num_tokens=4)
        return generate(step, params, draw()[:, :5], cache, **given).log_probs

    found, plain = made(lambda x: x.at[1].add(vector)), made(None)
    assert_near(found[0], plain[0], NEAR)
    assert_near(found, made(lambda x, positions: x.at[1].add(vector)), NEAR)
    assert np.abs(found[1] - plain[1]).max() > 1e-3
    with pytest.raises(ValueError, match="edit of block_0/residual sees padding"):
        made(lambda x: x.at[1].add(x[0]))


@pytest.mark.parametrize(
    ("edit", "shown"),
    [
        (zero("logits"), "{'logits': <zero>}"),
        (zero("block_0/attention/heads", heads=(1, 2)), "<zero, heads (1, 2)>"),
        (mean("block_0/residual", "rows", at=3), "<mean, over rows, at 3>"),
        (add("embedding", np.ones(14)), "<add, float32[14]>"),
        (add("embedding", np.ones(14), at=np.arange(5)), "<add, float32[14], at int64[5]>"),
        (resample({"embedding": np.ones((B, T, D))}), "<resample, float32[2,7,14]>"),
    ],
)
def test_edit_reprs_show_their_arguments(edit, shown):
    assert shown in repr(edit)


def test_expert_hidden_layers_have_no_heads():
    edit = zero("block_0/feed_forward/hidden", heads=1)["block_0/feed_forward/hidden"]
    with pytest.raises(ValueError, match="heads is 1: block_0/feed_forward/hidden has no heads"):
        edit(np.ones((B, T, 2, 5), np.float32))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda: zero("block_0/residual", heads=1), "heads is 1: block_0/residual has no heads"),
        (lambda: zero("block_0/attention/heads", heads=4), r"heads is 4: must be from 0 to 3"),
        (lambda: zero("block_0/residual", at=(1, 7)), r"at is \(1, 7\): must be from 0 to 6"),
        (lambda: zero("block_0/residual", at=-1), r"at is -1: must be from 0 to 6"),
        (lambda: zero("block_0/residual", at=0.5), "at is 0.5: must be an index or a list"),
        (lambda: zero("block_0/*", at=1), r"the last part of the name must not contain \*"),
        (lambda: mean("logits", "heads"), "over is 'heads': must be 'tokens', 'rows' or 'both'"),
        (lambda: add("embedding", np.ones(3)), r"vector has shape \[3\]: must match the last axes"),
        (lambda: add("embedding", 1.0), r"vector has shape \[\]"),
        (
            lambda: resample({"embedding": np.ones((B, 3, D))}),
            r"captured\['embedding'\] has shape \[2, 3, 14\]: must be \[2, 7, 14\], or the sa",
        ),
        (
            lambda: resample({"embedding": np.ones(B)}, at=1),
            r"captured\['embedding'\] has shape \[2\]: must be \[2, 7, 14\], or the same with",
        ),
    ],
)
def test_edits_with_wrong_shape_are_rejected(edit, message):
    model, params = model_of("gpt2")
    with pytest.raises(ValueError, match=message):
        made = edit()
        jax.eval_shape(model.edited(made).apply, {"params": params}, draw())
