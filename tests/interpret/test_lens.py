"""Logit lens and logit attribution against the formulas in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.interpret.tiny import SHAPES, VOCAB, B, L, N, T, draw, model_of, more, params_of
from tests.support import model_oracle as oracle
from tests.support.tolerances import FORWARD_F32, assert_near
from transformer_jax.config import ModelConfig, RecurrentConfig, Vectors
from transformer_jax.interpret import LogitAttribution, logit_attribution, logit_lens
from transformer_jax.models.factory import build

pytestmark = pytest.mark.usefixtures("quick_compilation")
NEAR = 5 * FORWARD_F32


def double(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("shape", ["gpt2", "llama", "bert", "sandwich", "t5"])
def test_logit_lens_applies_final_norm_and_output_to_every_stream(shape, scanned):
    model, params = model_of(shape, scanned=scanned)
    lens = jax.jit(partial(logit_lens, model))(params, draw(), **more(shape))
    assert lens.shape == (B, L + 1, T, VOCAB)
    logits = model.apply({"params": params}, draw(), **more(shape))[0]
    assert_near(lens[:, -1], logits, NEAR)
    if shape not in ("gpt2", "llama"):
        return
    hidden: list[np.ndarray] = []
    config, plain = SHAPES[shape], double(params_of(shape))
    oracle.forward(config, plain, draw(), hidden=hidden)
    table = plain["embed"]["tokens" if config.tie_embeddings else "output"]
    for row, streams in enumerate(hidden):
        for i in range(L):  # before each block
            want = oracle._norm(config, plain["decoder"]["norm"], streams[i]) @ table.T
            assert_near(lens[row, i], want, NEAR)


def test_logit_lens_of_embedding_is_normalized_and_projected():
    model, params = model_of("gpt2")
    found = jax.jit(lambda own: logit_lens(model, own, draw())[:, 0])(params)
    own = double(params)
    x = own["embed"]["tokens"][draw()] + own["embed"]["positions"][:T]
    norm = own["decoder"]["norm"]
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    assert_near(found, (x * norm["scale"] + norm["bias"]) @ own["embed"]["tokens"].T, NEAR)


@pytest.mark.slow
def test_logit_lens_uses_edited_streams():
    model, params = model_of("gpt2")
    edit = {"block_0/residual": lambda x: 2 * x}
    lens = jax.jit(lambda params: logit_lens(model.edited(edit), params, draw()))(params)
    logits, _ = jax.jit(model.edited(edit).apply)({"params": params}, draw())
    assert_near(lens[:, -1], logits, NEAR)


def attributed_by_definition(shape: str, tokens: np.ndarray, target: int, other: int):
    """Return each contribution in float64: the logit when all other parts are 0."""
    config, params = SHAPES[shape], double(params_of(shape))
    model, plain = model_of(shape)
    names = ("embedding", "block_*/attention/heads", "block_*/feed_forward/output", "*/residual")
    values = double(model.apply({"params": plain}, tokens, capture=names)[2])
    norm, embed = params["decoder"]["norm"], params["embed"]
    x = values[f"block_{L - 1}/residual"]
    centred = config.norm == "layernorm"
    middle = x.mean(-1, keepdims=True) if centred else 0.0
    size = np.sqrt(((x - middle) ** 2).mean(-1, keepdims=True) + config.norm_eps)
    table = embed["tokens" if config.tie_embeddings else "output"]
    direction = table[target] - table[other]

    def share(part: np.ndarray) -> np.ndarray:
        part = part - part.mean(-1, keepdims=True) if centred else part
        return part / size * (config.norm_unit_offset + norm["scale"]) @ direction

    heads = np.zeros((B, L, N, T))
    bias = np.zeros((B, T)) + norm.get("bias", np.zeros(len(direction))) @ direction
    for i in range(L):
        out = params["decoder"][f"block_{i}"]["attention"]["out"]
        for n in range(N):
            own = values[f"block_{i}/attention/heads"][:, :, n] @ out["kernel"][n]
            heads[:, i, n] = share(own)
        if "bias" in out:
            bias += share(np.broadcast_to(out["bias"], x.shape))
    forward = [share(values[f"block_{i}/feed_forward/output"]) for i in range(L)]
    return share(values["embedding"]), heads, np.stack(forward, 1), bias


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("shape", ["gpt2", "llama", "gemma", "neox"])
def test_logit_attributions_match_formula(shape, scanned):
    model, params = model_of(shape, scanned=scanned)
    found = jax.jit(partial(logit_attribution, model))(params, draw(), 3, 19)
    wanted = attributed_by_definition(shape, draw(), 3, 19)
    for one, want in zip(found, wanted, strict=False):
        assert np.abs(one - want).max() <= 1e-5 * np.abs(found.total()).max()


@pytest.mark.slow_except("gpt2")
@pytest.mark.parametrize(
    "shape",
    ["gpt2", "llama", "gemma", "t5", "encoder", "no norm", "gptj", "attention alone"],
)
def test_logit_attributions_sum_to_logit_and_logit_difference(shape):
    model, params = model_of(shape, scanned=shape == "llama")
    target, other = draw(3), draw(4)

    @jax.jit
    def run(params, rest):
        logits, _ = model.apply({"params": params}, draw(), **rest)
        one = logit_attribution(model, params, draw(), target, **rest)
        both = logit_attribution(model, params, draw(), target, other, **rest)
        return logits, one, one.total(), both.total()

    logits, one, total, difference = jax.device_get(run(params, more(shape)))
    take = partial(np.take_along_axis, logits, axis=-1)
    assert_near(total, take(target[..., None])[..., 0], 1e-5)
    wanted = (take(target[..., None]) - take(other[..., None]))[..., 0]
    assert_near(difference, wanted, 1e-5)
    assert (one.cross_heads is None) == (shape != "t5")
    assert (one.feed_forward is None) == (shape == "attention alone")


def test_total_attribution_is_sum_over_layers_and_heads(rng):
    sizes = dict(embedding=(2, 11), heads=(2, 3, 5, 11), feed_forward=(2, 3, 11), bias=(2, 11))
    parts = {name: rng.standard_normal(size) for name, size in sizes.items()}
    cross = rng.standard_normal((2, 7, 5, 11))
    wanted = sum(part.reshape(2, -1, 11).sum(1) for part in parts.values())
    np.testing.assert_allclose(LogitAttribution(**parts).total(), wanted)
    both = LogitAttribution(**parts, cross_heads=cross).total()
    np.testing.assert_allclose(both, wanted + cross.reshape(2, -1, 11).sum(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "arguments", "message"),
    [
        ("post", {},
         "norm_order is 'post': only in pre-norm and parallel models is the last stream a sum"),
        ("sandwich", {}, "norm_order is 'sandwich'"),
        ("gpt2", dict(target=VOCAB), r"token 31 at \[0, 0\]: must be from 0 to 30"),
        ("gpt2", dict(key=jax.random.key(3)), "does not accept key"),
    ],
)  # fmt: skip
def test_attribution_for_non_additive_models_is_rejected(shape, arguments, message):
    model, params = model_of(shape)

    def attribute(own):
        return logit_attribution(model, own, draw(), **{"target": 3, **arguments})

    with pytest.raises(ValueError, match=message):
        attribute(params) if "target" in arguments else jax.eval_shape(attribute, params)


def test_attribution_rejects_capped_or_missing_logits():
    scaled = build(ModelConfig(vocab_size=VOCAB, num_layers=1, residual_scale=0.5))
    with pytest.raises(ValueError, match=r"residual_scale is 0.5: must be None"):
        logit_attribution(scaled, {}, draw(), 3)
    capped = build(ModelConfig(vocab_size=VOCAB, num_layers=1, logit_softcap=5.0))
    with pytest.raises(ValueError, match=r"logit_softcap is 5.0: a capped logit is not a sum"):
        logit_attribution(capped, {}, draw(), 3)
    with pytest.raises(
        ValueError, match="logit_lens received a model of type RecurrentLM: must be a Decoder, "
    ):
        logit_lens(build(RecurrentConfig(vocab_size=VOCAB)), {}, draw())
    vectors = build(ModelConfig(kind="encoder", inputs=Vectors(width=3)))
    with pytest.raises(ValueError, match="such an encoder has no logits"):
        logit_lens(vectors, {}, draw())
    model, params = model_of("gpt2")
    with pytest.raises(ValueError, match="logit_lens does not accept an edit of final_norm"):
        logit_lens(model.edited({"final_*": jnp.sin}), params, draw())
    with pytest.raises(ValueError, match="logit_attribution does not accept an edit of block_0/re"):
        logit_attribution(model.edited({"block_*/residual": jnp.sin}), params, draw(), 3)
    with pytest.raises(TypeError, match=r"no argument 'edit'; use model.edited\(\{...\}\)"):
        logit_lens(model, params, draw(), edit={"embedding": jnp.sin})
