"""Tests of custom blocks: caching, scanning, edits, errors and runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax as tj
from tests.support.drawn import drawn
from transformer_jax.checkpoints.run_folder import config_from_json, config_to_json
from transformer_jax.config import ConfigError, CustomBlock
from transformer_jax.models.stack import stack_layers
from transformer_jax.training import fit

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = tj.ModelConfig(
    vocab_size=11, d_model=8, num_layers=2, num_heads=2, max_len=17, positions="rope", d_ff=13
)
TOKENS = np.arange(13)[None] % 11


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


@dataclass(frozen=True)
class Gated(CustomBlock):
    """Built-in block with a gate on the output of attention."""

    place: str = "attention/output"

    def init(self, config, key):
        return {"gate": jax.random.normal(key, (config.d_model, config.d_model))}

    def edit(self, params):
        return {self.place: lambda y: y * jax.nn.sigmoid(y @ params["gate"])}


@dataclass(frozen=True)
class Plain(CustomBlock):
    """Custom implementation of a pre-norm block with RMSNorm and no biases."""

    fault: str = ""

    def init(self, config, key):
        D, N, H, F = config.d_model, config.num_heads, config.key_dim, config.ff_dim
        shapes = dict(query=(D, N, H), key=(D, N, H), value=(D, N, H), out=(N, H, D), up=(D, F))
        return {n: {"kernel": jnp.zeros(s)} for n, s in (shapes | {"down": (F, D)}).items()}

    def run(self, params, x, call):
        w = {name: p["kernel"] for name, p in params.items()}
        y = norm(x)
        q, k, v = (jnp.einsum("BTD,DNH->BTNH", y, w[name]) for name in ("query", "key", "value"))
        if self.fault == "shape":
            q = q[..., :1]
        heads = q if self.fault == "never" else call.attend(q, k, v)
        if self.fault == "twice":
            call.attend(q, k, v)
        x = x + call.dropout(jnp.einsum("BTNH,NHD->BTD", heads, w["out"]))
        y = norm(x)
        x = x + call.dropout(jax.nn.silu(y @ w["up"]) @ w["down"])
        return x[:, :1] if self.fault == "result" else x


def applied(config, params, tokens=TOKENS, edit=None, **more):
    model = tj.build(config) if edit is None else tj.build(config).edited(edit)
    return jax.jit(lambda p: model.apply({"params": p}, tokens, **more))(params)


def test_custom_block_matches_builtin_block():
    """Both blocks have the same matrices; norm scales are 1."""
    ours = replace(CONFIG, num_layers=1, norm="rmsnorm", use_bias=False, activation="silu")
    own = replace(ours, block=Plain())
    params, mine = drawn(ours), drawn(own)
    block = params["decoder"]["block_0"]
    for name in ("norm_attention", "norm_feed_forward"):
        block[name]["scale"] = np.ones(8, np.float32)
    parts = block["attention"] | block["feed_forward"]
    mine["decoder"]["block_0"]["own"] = {name: parts[name] for name in Plain().init(ours, None)}
    mine = mine | {name: x for name, x in params.items() if name != "decoder"}
    mine["decoder"]["norm"] = params["decoder"]["norm"]
    capture = ("block_*/attention/weights", "block_0/residual")
    given = [applied(c, p, capture=capture) for c, p in ((ours, params), (own, mine))]
    for one, two in zip(*map(jax.tree.leaves, given), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("block", [Gated(), Gated("feed_forward/hidden"), Plain()], ids=repr)
@pytest.mark.parametrize(
    "change", [{}, dict(scan_layers=True), dict(window=5), dict(remat="full")], ids=str
)
def test_cached_decode_with_custom_block_matches_full_forward(block, change):
    if block == Gated("feed_forward/hidden"):
        change = change | dict(d_ff=8)
    config = replace(CONFIG, block=block, **change)
    params = drawn(config)
    out = tj.generate(
        tj.make_step(tj.build(config)), params, TOKENS[:, :5], tj.init_cache(config, 1, 16),
        num_tokens=7, capture=("logits",),
    )  # fmt: skip
    whole = np.concatenate([TOKENS[:, :5], out.tokens], axis=1)
    logits, _ = applied(config, params, whole[:, :-1])
    np.testing.assert_allclose(out.captured["logits"], logits[:, 4:], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_scanned_custom_block_matches_looped():
    for block in (Gated(), Plain()):
        config = replace(CONFIG, block=block)
        params = drawn(config)
        looped, _ = applied(config, params)
        stacked = stack_layers(params)
        scanned, _ = applied(replace(config, scan_layers=True), stacked)
        np.testing.assert_allclose(looped, scanned, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_call_edit_is_applied_after_block_edit():
    config = replace(CONFIG, block=Gated())
    params = drawn(config)
    seen = {}

    def look(value):
        seen["shape"] = value.shape
        return value * 0

    name = "block_0/attention/output"
    one, _, captured = applied(config, params, edit={name: look}, capture=(name,))
    assert seen["shape"] == (1, 13, 8) and not captured[name].any()
    assert np.abs(one - applied(config, params)[0]).max() > 1e-3


def gone(text):
    return config_from_json(text.replace("test_custom_block:", "test_gone:"))


def as_text(block):
    return config_to_json(tj.TrainConfig(model=replace(CONFIG, block=block)))


class Bare(CustomBlock):
    """Invalid: not a dataclass."""


@dataclass(frozen=True)
class Both(Plain, Gated):
    """Invalid: overrides both edit and run."""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: replace(CONFIG, block=Bare()), r"block is of class Bare: must be a frozen"),
        (lambda: replace(CONFIG, block=Gated), "block is .*must be"),
        (lambda: replace(CONFIG, block=Both()), "must override edit or run, not both"),
        (lambda: replace(CONFIG, block=Plain(), qk_norm=True), "qk_norm is True: is not used"),
        (
            lambda: replace(CONFIG, block=Plain(), attention_gate=True),
            "attention_gate is True: is not used by a custom block with `run`",
        ),
        (lambda: replace(CONFIG, block=Gated(), kind="encoder-decoder"), "needs kind 'decoder'"),
        (lambda: gone(as_text(Gated())), r"model.block.kind is .*test_gone:Gated.*import it first"),
        (lambda: config_from_json(as_text(Gated()).replace(f"{__name__}:Gated", "os:getcwd")),
         "model.block.kind is 'os:getcwd': must be a custom class for model.block"),
        (lambda: tj.save_pretrained("/nonexistent", replace(CONFIG, block=Plain()), {}),
         r"block is Plain\(fault=''\): no published family supports custom blocks"),
    ],
)  # fmt: skip
def test_invalid_custom_block_raises_one_line_error(call, message):
    with pytest.raises(ConfigError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (Plain("twice"), "attend was called twice"),
        (Plain("never"), "run must call attend once"),
        (Plain("shape"), r"attend: q is \[1, 13, 2, 1\]: .* requires \[1, 13, 2, 4\]"),
        (Plain("result"), r"run returns \(1, 1, 8\): must be \(1, 13, 8\)"),
        (
            Gated("attention/outputs"),
            "Gated.edit has 'attention/outputs': .*did you mean attention/out",
        ),
    ],
)
def test_faulty_custom_block_raises_error(block, message):
    params = drawn(replace(CONFIG, block=Plain() if isinstance(block, Plain) else Gated()))
    model = tj.build(replace(CONFIG, block=block))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: model.apply({"params": params}, TOKENS))


def test_parameters_from_another_block_raise_error():
    params = drawn(replace(CONFIG, block=Gated()))
    with pytest.raises(ValueError, match=r"parameters contain .*/own, but block is None"):
        jax.eval_shape(lambda: tj.build(CONFIG).apply({"params": params}, TOKENS))
    wrong = tj.build(replace(CONFIG, block=Plain()))
    with pytest.raises(ValueError, match=r"decoder/block_0/own has shapes .*Plain.init makes"):
        jax.eval_shape(lambda: wrong.apply({"params": params}, TOKENS))


def test_run_config_stores_custom_block_class_and_fields():
    config = tj.TrainConfig(model=replace(CONFIG, block=Gated("attention/heads")))
    text = config_to_json(config)
    assert f"{__name__}:Gated" in text and config_from_json(text) == config


@pytest.mark.slow
def test_run_with_custom_block_trains_resumes_and_loads(tmp_path):
    (tmp_path / "text.txt").write_text("abcdefghij" * 60)
    model = replace(CONFIG, block=Gated(), num_layers=1, dropout=0.1)
    config = tj.TrainConfig(
        model=model, data=str(tmp_path / "text.txt"), out=str(tmp_path / "run"), steps=4,
        batch_size=3, context=8, eval_every=4, checkpoint_every=2, sample_tokens=0,
    )  # fmt: skip
    whole = fit(config)
    half, stops = replace(config, out=str(tmp_path / "half")), iter([False, True])
    assert fit(half, stop=lambda: next(stops)).interrupted
    resumed = fit(half, resume=True)
    leaves = (jax.tree.leaves(r.state.params) for r in (whole, resumed))
    for one, two in zip(*leaves, strict=True):
        np.testing.assert_array_equal(one, two)
    loaded = tj.load(tmp_path / "run")
    assert loaded.config.block == Gated() and len(loaded.generate("ab", 3)) == 3
