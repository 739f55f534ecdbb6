"""Patching against a float64 model that starts at the patched stream, and against the clean run.

The blocks after block l form a model with the stream as its token vectors. The oracle runs it on a
stream with one row of another prompt.
"""

import dataclasses
from functools import cache, partial

import jax
import numpy as np
import pytest

from tests.interpret.tiny import SHAPES, B, D, L, T, draw, model_of, more, params_of
from tests.support import model_oracle as oracle
from tests.support.tolerances import FORWARD_F32, GRADIENT_F32, assert_near
from transformer_jax.interpret import attribution_patching, patch

pytestmark = pytest.mark.usefixtures("quick_compilation")
NEAR = 5 * FORWARD_F32
CLEAN, CORRUPTED = draw(3), draw(4)


def metric(logits):
    """Return the logit difference at the last token, summed over rows."""
    return (logits[:, -1, 3] - logits[:, -1, 19]).sum()


def rest_of(shape: str, layer: int, streams: np.ndarray) -> float:  # [B, T, D]
    """Return the metric of the model after stream `layer` (0 is the embedding), in float64."""
    config = dataclasses.replace(SHAPES[shape], num_layers=L - layer, positions="rope")
    params, total = params_of(shape), 0.0
    blocks = {f"block_{i - layer}": params["decoder"][f"block_{i}"] for i in range(layer, L)}
    for row in streams:
        embed = {**params["embed"], "tokens": row}
        own = {"embed": embed, "decoder": {**blocks, "norm": params["decoder"]["norm"]}}
        total += metric(oracle.forward(config, own, np.arange(T)[None]))
    return float(total)


@cache
def streams_of(prompt: str) -> list[np.ndarray]:  # of each layer [B, T, D]
    """Return the streams before each block of the Llama shape, in float64."""
    hidden: list[np.ndarray] = []
    tokens = {"clean": CLEAN, "corrupted": CORRUPTED}[prompt]
    oracle.forward(SHAPES["llama"], params_of("llama"), tokens, hidden=hidden)
    return [np.stack([row[i] for row in hidden]) for i in range(L)]


@cache
def logits_of(scanned: bool) -> list[np.ndarray]:
    """Return the logits of the GPT-2 shape for the clean and the corrupted prompts."""
    model, params = model_of("gpt2", scanned=scanned)
    apply = jax.jit(lambda tokens: model.apply({"params": params}, tokens)[0])
    return [np.asarray(apply(x), np.float64) for x in (CLEAN, CORRUPTED)]


STREAMS = ("embedding", "block_0/residual")  # the inputs of block 0 and block 1


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, True])
def test_patched_output_matches_float64_model(scanned):
    model, params = model_of("llama", scanned=scanned)
    found = patch(model, params, CLEAN, CORRUPTED, STREAMS, metric)
    wanted = np.zeros((L, T))
    for layer in range(L):
        for t in range(T):
            mixed = streams_of("corrupted")[layer].copy()
            mixed[:, t] = streams_of("clean")[layer][:, t]
            wanted[layer, t] = rest_of("llama", layer, mixed)
    assert_near(found, wanted, NEAR)
    assert np.ptp(wanted, axis=1).min() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("shape", ["gpt2", "t5", "bert"])
def test_head_patch_matches_individual_edits(shape, scanned):
    """Compute each entry with an edit of one head of one block at one token.

    The metric returns two logits of each row; their difference would cancel digits of float32.
    """
    both = lambda logits: logits[:, -1, [3, 19]]  # noqa: E731
    model, params = model_of(shape, scanned=scanned)
    apply = partial(model.apply, {"params": params}, **more(shape))
    names = [f"block_{i}/attention/heads" for i in range(L)]
    source = apply(CLEAN, capture=names)[2]
    run = partial(patch, model, params, CLEAN, CORRUPTED, "block_*/attention/heads", both)
    tables = {each: run(each=each, batch_size=5, **more(shape)) for each in
              (("token", "head"), ("head", "token"), ("head",), ())}  # fmt: skip
    for layer, t, n in [(0, 2, 1), (1, 6, 3), (1, 0, 0)]:
        name = names[layer]

        def found(select, name=name):
            edit = {name: lambda x: x.at[select].set(source[name][select])}
            edited = model.edited(edit)
            return both(edited.apply({"params": params}, CORRUPTED, **more(shape))[0])

        one = found(np.s_[:, t, n])
        assert_near(tables["token", "head"][layer, t, n], one, NEAR)
        assert_near(tables["head", "token"][layer, n, t], one, NEAR)
        assert_near(tables["head",][layer, n], found(np.s_[:, :, n]), NEAR)
        assert_near(tables[()][layer], found(np.s_[:]), NEAR)


@pytest.mark.slow_except("True")
@pytest.mark.parametrize("scanned", [False, True])
def test_patching_every_place_reproduces_clean_run(scanned):
    model, params = model_of("gpt2", scanned=scanned)
    clean, corrupted = (metric(x) for x in logits_of(scanned))
    places = ("embedding", "block_*/residual", "final_norm", "logits")
    whole = jax.jit(lambda own, x, y: patch(model, own, x, y, places, metric, each=()))
    assert_near(whole(params, CLEAN, CORRUPTED), np.full(L + 3, clean), NEAR)
    assert_near(whole(params, CORRUPTED, CORRUPTED), np.full(L + 3, corrupted), NEAR)


@pytest.mark.slow
def test_patching_with_per_row_metric_and_vmap_compiles_once():
    model, params = model_of("gpt2", scanned=True)
    traced = []

    def of_rows(logits):
        traced.append(logits.shape)
        return logits[:, -1, 3]

    found = patch(model, params, CLEAN, CORRUPTED, "block_*/residual", of_rows)
    assert found.shape == (L, T, B)
    assert len(traced) <= 2, "a table is traced once, not once an entry"
    for row in range(B):
        one = slice(row, row + 1)
        alone = patch(
            model, params, CLEAN[one], CORRUPTED[one], "block_*/residual", lambda y: y[0, -1, 3]
        )
        assert_near(found[..., row], alone, NEAR)

    def of_prompt(clean, corrupted):
        given = clean[None], corrupted[None], "block_*/residual", lambda y: y[0, -1, 3]
        return patch(model, params, *given)

    mapped = jax.jit(jax.vmap(of_prompt))(CLEAN, CORRUPTED)
    assert_near(mapped, found.transpose(2, 0, 1), NEAR)


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, True])
def test_attribution_patching_equals_derivative_of_patching(scanned):
    """Central differences in float64 along clean - corrupted."""
    model, params = model_of("llama", scanned=scanned)
    found = attribution_patching(model, params, CLEAN, CORRUPTED, STREAMS, metric)
    wanted, step = np.zeros((L, T)), 1e-5
    for layer in range(L):
        clean, own = streams_of("clean")[layer], streams_of("corrupted")[layer]
        for t in range(T):
            change = np.zeros_like(own)
            change[:, t] = (clean - own)[:, t]
            up, down = (rest_of("llama", layer, own + s * step * change) for s in (1, -1))
            wanted[layer, t] = (up - down) / (2 * step)
    assert_near(found, wanted, 2 * GRADIENT_F32)


def test_patching_logits_at_one_token_copies_clean_logits():
    """The metric is linear in the logits, with a different weight for each token."""
    model, params = model_of("gpt2", scanned=True)
    clean, corrupted = (x[..., 3] for x in logits_of(True))
    weights = np.arange(1.0, T + 1)[None]
    given = CLEAN, CORRUPTED, "logits", lambda y: (y[..., 3] * weights).sum()
    tables = jax.jit(lambda own: [x(model, own, *given) for x in (patch, attribution_patching)])
    exact, first = (x[0] for x in jax.device_get(tables(params)))
    wanted = ((clean - corrupted) * weights).sum(axis=0)
    assert np.abs(wanted).min() > 1e-3
    assert_near(exact, (corrupted * weights).sum() + wanted, NEAR)
    assert_near(first, wanted, NEAR)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["gpt2", "t5"])
def test_attribution_patching_matches_patching_to_first_order(shape):
    """Compare both tables for prompts with similar embeddings."""
    model, params = model_of(shape)
    near = jax.tree.map(np.copy, params)
    table, change = near["embed"]["tokens"], np.random.default_rng(3).standard_normal((13, D))
    table[13:26] = table[:13] + 3e-3 * change
    corrupted = draw() % 13
    clean = corrupted + 13
    run = dict(metric=metric, **more(shape))
    base = metric(model.apply({"params": near}, corrupted, **more(shape))[0])
    places = {
        "gpt2": [("block_*/attention/heads", ("head", "token")), ("block_*/residual", ())],
        "t5": [("block_*/attention/query", ("token", "head"))],
    }
    for place, each in places[shape]:
        given = model, near, clean, corrupted, place
        exact = np.asarray(patch(*given, each=each, **run)) - base
        first = attribution_patching(*given, each=each, **run)
        assert np.abs(exact).max() > 1e-4
        assert_near(first, exact, 3e-2, place)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(clean=CLEAN[:, :3]), r"clean has shape \[2, 3\]: must be the shape of corr"),
        (dict(places="block_*/heads"), r"no place is named 'block_\*/heads'"),
        (dict(places=()), "places is empty"),
        (dict(each="token"), "each is 'token': must contain 'token' or 'head'"),
        (dict(each=("layer",)), r"each is \('layer',\): must contain"),
        (dict(each=("head",)), r"each is \('head',\): block_0/residual has no heads"),
        (dict(places=("block_0/attention/key", "block_0/attention/query"), each=("head",)),
         "block_0/attention/query has 4 heads, but earlier places have 2"),
        (dict(capture=()), "does not accept capture"),
        (dict(key=jax.random.key(3)), "does not accept key"),
    ],
)  # fmt: skip
def test_invalid_patches_are_rejected(arguments, message):
    model, params = model_of("llama")
    given = dict(clean=CLEAN, corrupted=CORRUPTED, places="block_*/residual", metric=metric)
    for tool in (patch, attribution_patching):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda own, tool=tool: tool(model, own, **given | arguments), params)


@pytest.mark.slow
def test_patching_rejects_encoder_places():
    model, params = model_of("t5")
    with pytest.raises(
        ValueError, match="encoder/embedding: both prompts are read by the decoder, and they share"
    ):
        jax.eval_shape(
            lambda own: patch(
                model, own, CLEAN, CORRUPTED, "encoder/embedding", metric, **more("t5")
            ),
            params,
        )
