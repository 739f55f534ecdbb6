"""Path patching against a two-layer attention-only model in float64, and its sum rule."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.interpret.tiny import B, D, L, N, T, draw, model_of, more, params_of
from tests.support.tolerances import FORWARD_F32, assert_near
from transformer_jax.interpret import patch, path_patching
from transformer_jax.models.factory import build

pytestmark = pytest.mark.usefixtures("quick_compilation")
NEAR = 5 * FORWARD_F32
CLEAN, CORRUPTED = draw(3), draw(4)
HEADS = "block_*/attention/heads"


def metric(logits):
    return (logits[:, -1, 3] - logits[:, -1, 19]).sum()


class AttentionOnly:
    """GPT-2 shape without feed-forward branches, in NumPy float64."""

    def __init__(self):
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), params_of("gpt2"))
        self.embed, decoder = params["embed"], params["decoder"]
        self.blocks = [decoder[f"block_{i}"] for i in range(L)]
        self.final = decoder["norm"]

    def norm(self, x, own):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * own["scale"] + own["bias"]

    def read(self, name, i, x):  # [B, T, D] -> [B, T, N, H]
        own = self.blocks[i]["attention"][name]
        y = self.norm(x, self.blocks[i]["norm_attention"])
        return np.einsum("btd,dnh->btnh", y, own["kernel"]) + own["bias"]

    def heads(self, i, x, query=None):
        query = self.read("query", i, x) if query is None else query
        key, value = (self.read(name, i, x) for name in ("key", "value"))
        scores = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(key.shape[-1])
        weights = np.exp(np.where(np.tril(np.ones((T, T))), scores, -np.inf))
        weights = weights / weights.sum(-1, keepdims=True)
        return np.einsum("bnts,bsnh->btnh", weights, value)

    def out(self, i, heads):
        own = self.blocks[i]["attention"]["out"]
        return np.einsum("btnh,nhd->btd", heads, own["kernel"]) + own["bias"]

    def streams(self, tokens):
        """Return the streams before and after each block, and the outputs of its heads."""
        x = [self.embed["tokens"][tokens] + self.embed["positions"][:T]]
        heads = []
        for i in range(L):
            heads.append(self.heads(i, x[-1]))
            x.append(x[-1] + self.out(i, heads[-1]))
        return x, heads

    def metric(self, x):
        return metric(self.norm(x, self.final) @ self.embed["tokens"].T)


def without_feed_forward(kind):
    model, params = model_of("gpt2", scanned=kind == "scanned")
    if kind == "d_ff 0":
        config, blocks = dataclasses.replace(model.config, d_ff=0), dict(params["decoder"])
        gone = "feed_forward", "norm_feed_forward"
        for i in range(L):
            own = blocks[f"block_{i}"]
            blocks[f"block_{i}"] = {name: x for name, x in own.items() if name not in gone}
        return build(config), params | {"decoder": blocks}
    silent = lambda path, x: np.zeros_like(x) if "down" in str(path) else x  # noqa: E731
    return model, jax.tree_util.tree_map_with_path(silent, params)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["looped", "scanned", "d_ff 0"])
def test_path_patching_matches_attention_only_reference(
    kind,
):
    model, params = without_feed_forward(kind)
    given = model, params, CLEAN, CORRUPTED, HEADS
    direct = path_patching(*given, "logits", metric, batch_size=3)
    through = path_patching(*given, {"block_1/attention/query": (1, 3)}, metric)
    oracle = AttentionOnly()
    x, heads = oracle.streams(CORRUPTED)
    clean = oracle.streams(CLEAN)[1]
    want_direct, want_through = np.zeros((2, L, N))
    for n in range(N):
        for i in range(L):
            sent = heads[i].copy()
            sent[:, :, n] = clean[i][:, :, n]
            moved = oracle.out(i, sent) - oracle.out(i, heads[i])
            want_direct[i, n] = oracle.metric(x[2] + moved)
            query = oracle.read("query", 1, x[1])
            if i == 0:  # the output of block 1 does not reach its own queries
                query[:, :, [1, 3]] = oracle.read("query", 1, x[1] + moved)[:, :, [1, 3]]
            want_through[i, n] = oracle.metric(x[1] + oracle.out(1, oracle.heads(1, x[1], query)))
    assert_near(direct, want_direct, NEAR)
    assert_near(through, want_through, NEAR)
    assert min(np.ptp(direct), np.ptp(through[0])) > 0.01
    whole = patch(*given, metric, each=("head",))
    assert np.abs(whole[0] - direct[0]).max() > 0.01, "other paths count in patch alone"
    assert_near(whole[1], direct[1], NEAR)


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, True])
def test_direct_effects_sum_to_difference_without_norm(scanned):
    model, params = model_of("no norm", scanned=scanned)
    base, wanted = (metric(model.apply({"params": params}, x)[0]) for x in (CORRUPTED, CLEAN))
    given = model, params, CLEAN, CORRUPTED
    mapped = jax.jit(
        lambda own: [
            path_patching(*given[:1], own, *given[2:], senders, "logits", metric, each=each) - base
            for senders, each in [
                (HEADS, ("token", "head")),
                (("embedding", "block_*/feed_forward/output"), ("token",)),
                (("block_*/attention/output", "block_1/residual"), ()),
            ]
        ]
    )
    heads, others, whole = mapped(params)
    assert heads.shape == (L, T, N) and others.shape == (1 + L, T)
    # every effect is a difference of two rounded metrics, and the sum adds up their errors
    rounding = (heads.size + others.size) * FORWARD_F32 * max(abs(base), abs(wanted))
    assert abs(heads.sum() + others.sum() - (wanted - base)) <= rounding < 1e-3
    assert np.abs(whole[:L] - heads.sum((1, 2))).max() <= rounding
    assert_near(whole[L], wanted - base, 2 * NEAR)
    assert np.abs(heads[:, :-1]).max() < 1e-5, "what stands at other tokens is no direct effect"


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "scanned"), [("llama", True), ("t5", False), ("bert", False)])
def test_path_patching_to_all_receivers_matches_patch(shape, scanned):
    """A sender in the last block has only the direct path and the one through its feed-forward."""
    model, params = model_of(shape, scanned=scanned)
    last = "block_1/attention/heads"
    if shape == "t5":  # cross-attention lies between
        last = "block_1/cross_attention/heads"
    given, rest = (model, params, CLEAN, CORRUPTED, last), dict(more(shape))
    wanted = patch(*given, metric, each=("head",), **rest)
    found = path_patching(
        *given, "logits", metric, recomputed="block_*/feed_forward/output", **rest
    )
    assert_near(found, wanted, NEAR)
    frozen = path_patching(*given, "logits", metric, **rest)
    assert np.abs(frozen - wanted).max() > 1e-3
    received = path_patching(*given, "block_1/feed_forward/input", metric, **rest)
    assert np.abs(received - wanted).max() > 1e-3
    base = metric(model.apply({"params": params}, CORRUPTED, **rest)[0])
    assert np.abs(received - base).max() > 1e-3


def test_embedding_direct_effect_equals_its_logit_contribution():
    """Without a final norm, a logit is linear in the stream; each token has a different weight."""
    model, params = model_of("no norm")
    apply = jax.jit(lambda tokens: model.apply({"params": params}, tokens)[0])
    weights, table = np.arange(1.0, T + 1)[None], np.asarray(params["embed"]["tokens"], np.float64)
    of = lambda logits: (logits[..., 3] * weights).sum()  # noqa: E731
    found = path_patching(
        model, params, CLEAN, CORRUPTED, "embedding", "logits", of, each=("token",)
    )[0]
    base = of(np.asarray(apply(CORRUPTED), np.float64))
    change = (table[CLEAN] - table[CORRUPTED]) @ table[3]
    assert_near(found, base + (change * weights).sum(axis=0), NEAR)


@pytest.mark.slow
def test_path_patching_supports_per_row_metric_and_vmap():
    model, params = model_of("gpt2")

    def of(clean, corrupted):
        return path_patching(
            model, params, clean[None], corrupted[None], HEADS, "block_1/attention/key",
            lambda logits: logits[0, -1, 3],
        )  # fmt: skip

    mapped = jax.jit(jax.vmap(of))(CLEAN, CORRUPTED)
    rows = path_patching(
        model, params, CLEAN, CORRUPTED, HEADS, "block_1/attention/key", lambda x: x[:, -1, 3]
    )
    assert mapped.shape == (B, L, N)
    assert_near(rows.transpose(2, 0, 1), mapped, NEAR)
    assert D and np.ptp(mapped[:, 0]) > 1e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(senders="block_0/attention/query"), "senders contains block_0/attention/query:"),
        (dict(receivers="block_1/attention/heads"), "receivers contains block_1/attention/heads"),
        (dict(receivers="block_1/attention/output"), "receivers contains block_1/attention/output"),
        (dict(receivers=()), "receivers is empty: pass 'logits' for the direct effect"),
        (dict(recomputed="block_0/attention/key"), "recomputed contains block_0/attention/key:"),
        pytest.param(
            dict(receivers={"block_1/attention/query": 4}), r"heads is 4: must be from 0 to 3",
            marks=pytest.mark.slow,
        ),
        (dict(senders="block_0/attention/output"), r"block_0/attention/output has no heads"),
        (dict(capture=()), "path_patching does not accept capture"),
    ],
)  # fmt: skip
def test_invalid_path_patching_arguments_are_rejected(arguments, message):
    model, params = model_of("llama")
    given = dict(clean=CLEAN, corrupted=CORRUPTED, senders=HEADS, receivers="logits", metric=metric)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda own: path_patching(model, own, **given | arguments), params)
