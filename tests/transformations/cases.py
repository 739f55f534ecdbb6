"""The functions in the rows of the table of transformations, with small arguments.

A case is a function of a tree of floating arrays and a tree of other arrays. The letters `b` and
`t` in a shape are axes that an export may leave open.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import transformer_jax as tj
from tests.support import oracle
from transformer_jax import attention
from transformer_jax.attention.additive import additive_attention, state_attention
from transformer_jax.lectures.recurrent import RecurrentSeq2Seq
from transformer_jax.models.ops import layer_norm, rms_norm
from transformer_jax.models.positions import apply_rope, learned, shaw_scores, sinusoidal

SIZES = dict(b=2, t=5)
Shape = tuple[str | int, ...]


@dataclass(frozen=True)
class No:
    """The reason why a column has no mark, and the error that its check raises."""

    reason: str
    raises: type[Exception] | tuple[type[Exception], ...]
    names: str = ""


@dataclass(frozen=True)
class Case:
    """A function f(floats, others), the shapes of its arguments, and its unsupported columns."""

    name: str
    function: Callable[[Any, Any], Any]
    floats: Mapping[str, Shape] = field(default_factory=dict)
    others: Mapping[str, tuple[Shape, Callable[[np.random.Generator, tuple[int, ...]], Any]]] = (
        field(default_factory=dict)
    )
    params: Callable[[], Any] | None = None
    """More floats with fixed shapes, the entry "params" of the first tree."""
    cannot: Mapping[str, No] = field(default_factory=dict)
    """The columns without a mark."""
    sizes: Mapping[str, int] = field(default_factory=lambda: SIZES)
    definition: Callable[[Any, Any], Any] | None = None
    """The same function in NumPy float64, if differences in float32 are too coarse."""

    def arguments(self, **sizes: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return both trees of arguments as NumPy arrays, for some sizes."""
        sizes = {**self.sizes, **sizes}
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))

        def concrete(shape: Shape) -> tuple[int, ...]:
            return tuple(sizes[n] if isinstance(n, str) else n for n in shape)

        floats: dict[str, Any] = {
            name: rng.standard_normal(concrete(shape)).astype(np.float32)
            for name, shape in self.floats.items()
        }
        others = {name: make(rng, concrete(shape)) for name, (shape, make) in self.others.items()}
        if self.params is not None:
            floats["params"] = self.params()
        return floats, others

    def shapes(self, open_axes: str) -> tuple[Any, Any]:
        """Return both trees as shapes for an export with these axes open."""
        floats, others = self.arguments()
        scope = jax.export.SymbolicScope()
        written = {**self.floats, **{name: shape for name, (shape, _) in self.others.items()}}

        def one(name: str, x: Any) -> Any:
            spec = ", ".join(
                str(n) if isinstance(n, str) and n in open_axes else str(size)
                for n, size in zip(written[name], x.shape, strict=True)
            )
            shape = jax.export.symbolic_shape(spec or "", scope=scope) if spec else ()
            return jax.ShapeDtypeStruct(shape, x.dtype)

        def tree(arrays: dict[str, Any]) -> dict[str, Any]:
            plain = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
            return {
                name: one(name, x) if name in written else jax.tree.map(plain, x)
                for name, x in arrays.items()
            }

        return tree(floats), tree(others)


def integers(least: int, end: int) -> Callable[..., np.ndarray]:
    return lambda rng, shape: rng.integers(least, end, shape, dtype=np.int32)


def counted(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return positions, with padding as the first token of the first row."""
    positions = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape).copy()
    positions[0, 0] = -1
    return positions


def documents(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.sort(rng.integers(1, 3, shape, dtype=np.int32), axis=-1)


TOKENS = {"tokens": (("b", "t"), integers(0, 11))}
SOURCE = {"source": (("b", 3), integers(0, 7))}
QKV: dict[str, Shape] = dict(q=("b", "t", 4, 8), k=("b", "t", 2, 8), v=("b", "t", 2, 8))


def attend(implementation: str | None, x: Any, others: Any, **options: Any) -> Any:
    return tj.dot_product_attention(
        x["q"], x["k"], x["v"], implementation=implementation, return_lse=True, **options
    )


def masked(implementation: str | None, x: Any, others: Any) -> Any:
    """Call attention with every kind of argument: masks, bias, sinks, softcap, positions."""
    at = others["positions"]
    mask = tj.Causal() & tj.Segments(others["segments"]) & tj.Window(4)
    return attend(
        implementation, x, others, mask=mask, bias=tj.ALiBi(x["slopes"]), sinks=x["sinks"],
        softcap=2.0, q_positions=at, k_positions=at,
    )  # fmt: skip


def defined(x: Any, others: Any) -> Any:
    found = oracle.attention(x["q"], x["k"], x["v"])
    return found.out, found.lse


def defined_masked(x: Any, others: Any) -> Any:
    at, ids = others["positions"], others["segments"]
    seen = oracle.both(oracle.causal(), oracle.both(oracle.segments(ids), oracle.window(4)))
    apart = np.abs(at[:, None, :, None] - at[:, None, None, :])
    found = oracle.attention(
        x["q"], x["k"], x["v"], softcap=2.0, sinks=x["sinks"],
        mask=oracle.allowed(seen, at, at, batch=len(at), heads=4),
        bias=-x["slopes"][None, :, None, None] * apart,
    )  # fmt: skip
    return found.out, found.lse


MASKED = dict(
    floats=dict(QKV, slopes=(4,), sinks=(4,)),
    others=dict(positions=(("b", "t"), counted), segments=(("b", "t"), documents)),
)


def named(name: str | None) -> str:
    return "default" if name is None else f'"{name}"'


def attention_cases() -> list[Case]:
    found = []
    for name in (None, "xla", "blockwise", "native"):
        for t in (5, 67):  # for 67, None chooses "native" or "blockwise" rather than "xla"
            sizes = dict(b=2, t=t)
            cannot = {}
            if name in ("blockwise", "native"):
                why = 'its tiles need fixed sizes: implementation="xla" has it'
                tiles = No(why, NotImplementedError, "needs fixed sizes")
                cannot = {"export, batch": tiles, "export, length": tiles}
            title = f"dot_product_attention, {named(name)}, T = {t}"
            both: Any = dict(sizes=sizes, cannot=cannot)
            found.append(Case(title, partial(attend, name), QKV, definition=defined, **both))
            both = dict(both, definition=defined_masked, **MASKED)
            found.append(Case(f"{title}, masked", partial(masked, name), **both))
    weights = lambda x, _: tj.dot_product_attention_weights(x["q"], x["k"], mask=tj.Causal())  # noqa: E731
    found.append(Case("dot_product_attention_weights", weights, QKV))
    return found


SMALL: dict[str, Any] = dict(
    vocab_size=11, d_model=8, num_heads=2, num_layers=1, d_ff=7, max_len=70, init_std=0.5
)


@cache
def params_of(config: Any) -> Any:
    return jax.tree.map(np.asarray, tj.init_params(config, jax.random.key(1)))


def model_case(name: str, config: Any, **changes: Any) -> Case:
    model = tj.build(config)
    source = isinstance(model, tj.EncoderDecoder | RecurrentSeq2Seq)

    def run(floats: Any, others: Any) -> Any:
        given = {name: others[name] for name in ("source", "segments") if name in others}
        return model.apply({"params": floats["params"]}, others["tokens"], **given)[0]

    others: dict[str, Any] = dict(TOKENS, **(SOURCE if source else {}))
    return Case(name, run, {}, others, partial(params_of, config), **changes)


def model_cases() -> list[Case]:
    kinds: dict[str, Any] = {
        **{
            f"Decoder, {positions}": tj.ModelConfig(**SMALL, positions=positions)
            for positions in ("none", "learned", "sinusoidal", "rope", "shaw", "t5", "alibi")
        },
        "Decoder, grouped heads, window and sinks": tj.ModelConfig(
            **SMALL, num_kv_heads=1, window=4, sink_tokens=1
        ),
        "Decoder, scanned, gated, RMSNorm": tj.ModelConfig(
            **SMALL, scan_layers=True, glu=True, norm="rmsnorm", activation="silu", remat="full"
        ),
        "Encoder": tj.ModelConfig(**SMALL, kind="encoder"),
        "EncoderDecoder": tj.ModelConfig(**SMALL, kind="encoder-decoder"),
        "RecurrentLM, rnn": tj.RecurrentConfig(vocab_size=11, d_embed=5, d_hidden=7, cell="rnn"),
        "RecurrentLM, lstm": tj.RecurrentConfig(vocab_size=11, d_embed=5, d_hidden=7),
        "RecurrentSeq2Seq": tj.RecurrentConfig(
            vocab_size=11, source_vocab_size=7, d_embed=5, d_hidden=7, cell="gru",
            attention="additive",
        ),
        "ConvolutionLM": tj.ConvolutionConfig(vocab_size=11, d_hidden=3, num_layers=2),
        "WindowLM": tj.WindowConfig(vocab_size=11, context=2, d_embed=3, d_hidden=5),
    }  # fmt: skip
    found = [model_case(name, config) for name, config in kinds.items()]
    tiny = tj.preset("tiny")
    found.append(model_case('preset("tiny"), T = 64', tiny, sizes=dict(b=1, t=64)))
    return found


def loss_cases() -> list[Case]:
    others: dict[str, Any] = {"labels": (("b", "t"), integers(0, 11))}
    chunked = lambda x, y: tj.chunked_cross_entropy(  # noqa: E731
        x["hidden"], x["table"], y["labels"], chunk_size=2
    )
    return [
        Case(
            "cross_entropy",
            lambda x, y: tj.cross_entropy(x["logits"], y["labels"], z_loss=0.1),
            dict(logits=("b", "t", 11)),
            others,
        ),
        Case(
            "chunked_cross_entropy",
            chunked,
            dict(hidden=("b", "t", 6), table=(11, 6)),
            others,
        ),
    ]


def small_cases() -> list[Case]:
    at: dict[str, Any] = {"positions": (("b", "t"), counted)}
    x4: dict[str, Shape] = dict(x=("b", "t", 2, 8))
    none = No("has no derivative: its result is integers", TypeError)
    indices = {"grad": none, "jvp": none, "second order": none}
    state = dict(h=("b", 3, 4), keys=("b", 5, 6))
    heads = {name: ("b", "t", 2, 3) for name in "qkv"}
    return [
        Case("apply_rope", lambda x, y: apply_rope(x["x"], y["positions"], tj.Rope()), x4, at),
        Case(
            "sinusoidal",
            lambda x, y: sinusoidal(y["positions"], 6) * x["s"].astype(jnp.float32),
            dict(s=()),
            at,
        ),
        Case(
            "learned",
            lambda x, y: learned(x["table"], y["positions"]),
            dict(table=(9, 4)),
            at,
        ),
        Case(
            "shaw_scores",
            lambda x, y: shaw_scores(x["x"], x["table"], y["positions"], y["positions"]),
            dict(x4, table=(7, 8)),
            at,
        ),
        Case(
            "layer_norm",
            lambda x, _: layer_norm(x["x"], x["g"], x["g"]),
            dict(x=("b", "t", 6), g=(6,)),
        ),
        Case("rms_norm", lambda x, _: rms_norm(x["x"], x["g"]), dict(x=("b", "t", 6), g=(6,))),
        Case(
            "additive_attention",
            lambda x, _: additive_attention(
                x["h"], x["keys"], x["keys"], w_query=x["wq"], w_key=x["wk"], v=x["v"]
            ),
            dict(state, wq=(4, 5), wk=(6, 5), v=(5,)),
        ),
        Case(
            "state_attention",
            lambda x, _: state_attention(x["h"], x["keys"], w=x["w"]),
            dict(state, w=(4, 6)),
        ),
        Case(
            "linear_attention",
            lambda x, _: attention.linear_attention(x["q"], x["k"], x["v"], chunk_size=4),
            heads,
        ),
        Case(
            "gated_delta_rule",
            lambda x, _: attention.gated_delta_rule(
                x["q"],
                0.3 * x["k"],
                x["v"],
                -jax.nn.softplus(x["decay"]),
                jax.nn.sigmoid(x["beta"]),
                chunk_size=4,
            ),
            dict(heads, decay=("b", "t", 2), beta=("b", "t", 2)),
        ),
        Case(
            "causal_conv",
            lambda x, _: attention.causal_conv(x["x"], x["w"]),
            dict(x=("b", "t", 3), w=(4, 3)),
        ),
        Case(
            "ALiBi, RelativeBias",
            lambda x, y: (
                tj.ALiBi(x["s"]).materialize(y["positions"], y["positions"]),
                tj.RelativeBias(x["table"], bidirectional=True, max_distance=9).materialize(
                    y["positions"], y["positions"]
                ),
            ),
            dict(s=(2,), table=(8, 2)),
            at,
        ),
        Case(
            "Greedy",
            lambda x, _: tj.Greedy()(jax.random.key(0), x["logits"]),
            dict(logits=("b", 11)),
            cannot=indices,
        ),
        Case(
            "Sample, TopK, TopP",
            lambda x, y: tj.Sample(tj.Temperature(0.7), tj.TopK(5), tj.TopP(0.9))(
                jax.random.key(0), x["logits"]
            ),
            dict(logits=("b", 11)),
            cannot=indices,
        ),
    ]


def cached(config: Any, dtype: Any, x: Any, y: Any) -> Any:
    """Read a prompt into a cache, then one more token."""
    model = tj.build(config)
    state = tj.init_cache(config, y["tokens"].shape[0], 9, dtype)
    _, state = model.apply({"params": x["params"]}, y["tokens"], cache=state)
    return model.apply({"params": x["params"]}, y["tokens"][:, :1], cache=state)


def decoding_cases() -> list[Case]:
    config = tj.ModelConfig(**{**SMALL, "max_len": 9}, positions="rope")
    model = tj.build(config)
    params = partial(params_of, config)
    none = No("has no derivative: its result is integers", TypeError)
    whole = No("counts a prompt's rows when called: export the step of make_step", Exception)
    indices = {"grad": none, "jvp": none, "second order": none}
    written = {**indices, "export, batch": whole, "export, length": whole}
    rounded = No("values read back from int8 are rounded, without a derivative", AssertionError)
    return [
        Case("Decoder with a cache", partial(cached, config, None), {}, TOKENS, params),
        Case(
            "Decoder with a cache of int8", partial(cached, config, jnp.int8), {}, TOKENS, params,
            cannot={"grad": rounded, "jvp": rounded, "second order": rounded},
        ),
        Case(
            "generate",
            lambda x, y: tj.generate(
                tj.make_step(model), x["params"], y["tokens"],
                tj.init_cache(config, y["tokens"].shape[0], 9), num_tokens=3,
            ),
            {}, TOKENS, params, written,
        ),
        Case(
            "beam_search",
            lambda x, y: tj.beam_search(
                tj.make_step(model), x["params"], y["tokens"],
                tj.init_cache(config, y["tokens"].shape[0], 9), num_tokens=3, num_beams=2,
            ),
            {}, TOKENS, params, written,
        ),
    ]  # fmt: skip


def all_cases() -> dict[str, Case]:
    found = attention_cases() + model_cases() + loss_cases() + small_cases() + decoding_cases()
    return {case.name: case for case in found}
