"""Fuzz test that every function detects a single NaN or infinity in a long row.

    python -m tests.decoding.fuzz_nan --minutes 1 --seed 0

A case draws the length of the rows, the index of the bad value, the dtype, how the value is made (a
constant or traced arithmetic, of either sign) and whether the call is vmapped. Everything runs
inside `jit`, where XLA's maximum on a CPU and `lax.top_k` overlook some of these values. The other
rows must not change.
"""

import argparse
import sys
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import transformer_jax as tj
from transformer_jax.cache.kv_cache import quantize
from transformer_jax.checks import has_finite_maximum
from transformer_jax.config import Experts
from transformer_jax.decoding import beams, speculative
from transformer_jax.decoding.logit_processors import apply_processors
from transformer_jax.decoding.proposers import Proposal
from transformer_jax.decoding.samplers import RowSampling, Typical
from transformer_jax.interpret.dictionaries import Dictionary
from transformer_jax.models.experts import route
from transformer_jax.models.quantized import _rounded
from transformer_jax.pretrained.sentences import pool_sentences
from transformer_jax.training.losses import chunked_cross_entropy, cross_entropy

LENGTHS, DTYPES = (5, 64, 129, 1000, 4099), ("float32", "bfloat16", "float16")
MADE = {
    "nan": lambda inf: jnp.float32(jnp.nan), "-nan": lambda inf: -jnp.float32(jnp.nan),
    "inf - inf": lambda inf: inf - inf, "-(inf - inf)": lambda inf: -(inf - inf),
    "inf": lambda inf: inf,
}  # fmt: skip
"""Ways to make the value from an infinity that is not a compile-time constant."""


@dataclass(frozen=True)
class NanToNum:
    """A custom processor with the same repr in each process."""

    def __call__(self, x):
        return jnp.nan_to_num(x)


SAMPLERS = (
    tj.Greedy(), tj.Sample(), tj.Sample(tj.Temperature(0.7)), tj.Sample(tj.Temperature(0)),
    tj.Sample(tj.TopK(5)), tj.Sample(tj.TopP(0.9)), tj.Sample(tj.MinP(0.1)),
    tj.Sample(Typical(0.8)), tj.Sample(tj.Temperature(1e-30), tj.TopK(40), tj.TopP(0.5)),
    tj.Sample(NanToNum()),
)  # fmt: skip
KEY = jax.random.key(0)


def history(x):
    """Exclude token 3, which has the bad value in half of the cases."""
    return apply_processors((tj.Ban(3),), object(), x)


def by_rows(x):
    rows = jnp.arange(len(x))
    processed = RowSampling(0.5 + rows % 3, jnp.where(rows % 2 == 0, 0.9, 1.0))(x)
    return ~has_finite_maximum(processed)


def attends(place):
    """Return whether attention propagates a bad value in a query, key, value or bias."""

    def detected(x):
        rows = jnp.broadcast_to(jnp.sin(jnp.arange(x.shape[1] * 8.0)), (len(x), x.shape[1] * 8))
        k = rows.reshape(len(x), -1, 1, 8).astype(x.dtype)
        inputs = dict(query=k if place == "query" else k[:, :1], key=k, value=k)
        if place == "bias":
            inputs["bias"] = x[:, None, None].astype(jnp.float32)
        else:
            inputs[place] = k + x[:, :, None, None]
        outputs = [
            tj.dot_product_attention(**inputs, implementation=name) for name in ("xla", "blockwise")
        ]
        bad = [jnp.isnan(out).any(axis=(1, 2, 3)) for out in outputs]
        return bad[0] & bad[1]

    return detected


def proposed(x):
    B = len(x)
    proposal = Proposal(jnp.zeros((B, 1), jnp.int32), x[:, None].astype(jnp.float32))
    return ~speculative._usable(proposal, jnp.ones(B, jnp.int32), x.shape[1])[:, 0]


def encoded(x):
    """Whether the features of a dictionary propagate a bad value in their bias."""

    def of_row(bias):
        (n,) = bias.shape
        one = jnp.ones((2, n), jnp.float32)
        dictionary = Dictionary(
            encoder=one, encoder_bias=bias.astype(jnp.float32), decoder=one.T, bias=jnp.zeros(2),
            centre=jnp.zeros(2), size=jnp.ones(()), target_centre=jnp.zeros(2),
            target_size=jnp.ones(()), place="residual", target="residual", active=2,
        )  # fmt: skip
        return ~jnp.isfinite(dictionary.encode(jnp.ones((1, 2)))).all()

    return jax.vmap(of_row)(x)


def losses(x):
    def of_row(row):
        logits, labels = row[None, None], jnp.zeros((1, 1), jnp.int32)
        whole = cross_entropy(logits, labels)[0]
        cut = chunked_cross_entropy(
            jnp.ones((1, 1, 1), row.dtype), row[:, None], labels, chunk_size=1
        )[0]
        return ~jnp.isfinite(whole) & ~jnp.isfinite(cut)

    return jax.vmap(of_row)(x)


BEAMS = beams._BeamOptions(1, 1, 1, (), (tj.Ban(3),), 1, None, False)

PLACES = {
    **{f"{s!r}": lambda x, s=s: s(jax.random.clone(KEY), x) == -1 for s in SAMPLERS},
    **{f"{s!r}.distribution": lambda x, s=s: jnp.isnan(s.distribution(x)).all(-1)
       for s in SAMPLERS[1:]},
    **{f"{p!r}": lambda x, p=p: ~has_finite_maximum(p(x)) for s in SAMPLERS[2:8]
       for p in s.processors},
    "Greedy.distribution": lambda x: ~has_finite_maximum(tj.Greedy().distribution(x)),
    "RowSampling": by_rows,
    "Ban": lambda x: ~has_finite_maximum(history(x)),
    "beams": lambda x: ~beams._log_probs(BEAMS, object(), x)[1],
    "speculation": proposed,
    "pooling": lambda x: ~jnp.isfinite(
        pool_sentences(x[:, :, None], jnp.ones(x.shape, bool), "max", False)[:, 0]),
    "cache": lambda x: ~jnp.isfinite(quantize(x)[1]),
    "kernel": lambda x: ~jnp.isfinite(_rounded(x[:, :, None], 8)[1]).all((-1,)),
    "experts": lambda x: jnp.isnan(route(Experts(count=x.shape[1], top_k=2), x)[1]).all(-1),
    "dictionary": encoded,
    "losses": losses,
    **{f"attention by {place}": attends(place) for place in ("query", "key", "value", "bias")},
}  # fmt: skip


def check(name, length, at, dtype, made, mapped, seed):
    """Return an error message if a case fails, otherwise None."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(3, length)).astype(np.float32)
    detected = PLACES[name]

    @jax.jit
    def run(rows, inf):
        x = rows.astype(dtype).at[1, at].set(MADE[made](inf).astype(dtype))
        return jax.vmap(lambda row: detected(row[None])[0])(x) if mapped else detected(x)

    found = np.asarray(run(rows, np.float32(np.inf))).reshape(3).tolist()
    if found != [False, True, False]:
        case = f"{made} at {at} of {length}, {dtype}{', vmap' * mapped}, seed {seed}"
        return f"{name}: {case}: detected {found}"
    return None


def case_of(rng, name):
    made = str(rng.choice([*MADE]))
    if name == "experts" and made == "inf":
        made = "nan"  # an infinite logit gets all the weight
    if name == "dictionary" and made.startswith("-"):
        made = "inf - inf"  # ReLU may remove a negative value
    length = int(rng.choice(LENGTHS))
    at = 3 if rng.random() < 0.5 else int(rng.integers(length))
    return (
        length, at, str(rng.choice(DTYPES)), made, bool(rng.integers(2)), int(rng.integers(2**31)),
    )  # fmt: skip


def fuzz(seed, cases=None, minutes=None):
    """Return the number of cases and the error messages."""
    rng, failed, ran = np.random.default_rng(seed), [], 0
    end = time.monotonic() + 60 * (minutes or 0)
    while ran < cases if cases is not None else time.monotonic() < end:
        name = [*PLACES][ran % len(PLACES)]
        wrong = check(name, *case_of(rng, name))
        failed += [wrong] if wrong else []
        ran += 1
    return ran, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    ran, failed = fuzz(args.seed, minutes=args.minutes)
    print(*failed, f"{ran} cases, {len(failed)} failed", sep="\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
