"""Prune the heads of a translation model one by one, and measure the loss in BLEU.

    python -m reproduce.interpret.pruning --data multi30k --runs runs --seeds 3

Michel et al. 2019, "Are Sixteen Heads Really Better than One?" (arXiv:1905.10650), show that most
heads can be removed individually, and many of them together. Cross-attention heads are the most
difficult to remove. Voita et al. 2019, "Analyzing Multi-Head Self-Attention" (arXiv:1905.09418),
show that the important heads have specific roles. Encoder heads are pruned first, and
cross-attention heads last. Garg et al. 2019 (arXiv:1909.02074) show that a few cross-attention
heads align words.

An encoder-decoder is trained on the German and English sentences of multi30k, as read by
`reproduce.pairs`. A head is pruned by an edit, which multiplies its output by 0, and the model is
not retrained. The importance of a head is defined as in Michel et al. It is computed on the
validation part, where m_h = 1 is the factor of head h, and divided by the norm over the heads of
its layer:

    I_h = mean over pairs of |d log p(target | source) / d m_h|

BLEU is computed on sentences of the test part with greedy decoding. Links between words are found
with IBM's model 1 (Brown et al. 1993), which is fitted to the training part, independently of the
translation model.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import transformer_jax as tj
from reproduce import pairs
from reproduce.interpret.shared import print_figures, read_arguments
from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.config import Rope
from transformer_jax.lectures.demos.shared import COLOURS, label, new_figure, save_picture
from transformer_jax.loading import TextModel, load_run
from transformer_jax.models.factory import init_decode_state
from transformer_jax.models.places import Edit
from transformer_jax.tokenizers.special import target_of
from transformer_jax.training.data import IGNORE
from transformer_jax.training.rows import stack_rows
from transformer_jax.training.tasks.metrics import compare_texts
from transformer_jax.training.tasks.pairs import Pair, pair_example

KINDS = {
    "encoder": "encoder/block_{}/attention/heads",
    "decoder": "block_{}/attention/heads",
    "source": "block_{}/cross_attention/heads",
}
"""Places of the encoder heads, the decoder's self-attention heads, and the cross-attention
heads."""
CONFIG = tj.ModelConfig(
    kind="encoder-decoder", d_model=128, num_layers=3, num_heads=4, d_ff=256, max_len=64,
    positions=Rope(), dropout=0.1,
)  # fmt: skip
RECIPE: dict[str, Any] = dict(batch_size=64, learning_rate=2e-3, word_count=5)
LONGEST, ROWS = 40, 64
"""Maximum number of generated words, and number of pairs per gradient computation."""
ALIGNED, CLEAR = 0.5, 0.2
"""Minimum fraction of links found by an alignment head, and minimum p(word | source word) of a
link."""
LOSS = 1.0
"""Loss in BLEU that is considered significant."""


class Rows(NamedTuple):
    """Pairs as model inputs."""

    source: np.ndarray  # i32[B, S]
    positions: np.ndarray  # i32[B, S], negative at padding
    tokens: np.ndarray  # i32[B, T]
    labels: np.ndarray  # i32[B, T]
    texts: list[str]
    """Reference texts for BLEU."""


class Found(NamedTuple):
    """Measurements of one translation model. The first axes of arrays are kind and layer."""

    bleu: float
    aligned: np.ndarray  # f32[L, N]: links on which a cross-attention head has its largest weight
    without_aligned: float
    without_others: float
    single: np.ndarray  # f32[3, L, N]: BLEU without the head
    importance: np.ndarray  # f32[3, L, N]
    order: np.ndarray  # i32[3 L N]: heads in the order of pruning
    pruned: np.ndarray  # f32[2, steps]: BLEU by fraction left, in this order and in a random order
    of_kind: dict[str, float]
    """BLEU with only the most important quarter of the heads of one kind."""
    minutes: float
    """Training time in minutes according to the log."""


def edits(masks: jax.Array) -> dict[str, Edit]:  # f32[3, L, 1 or B, N]
    """Return edits that multiply the output of each head by its mask."""

    def scaled(mask: jax.Array) -> Edit:
        return lambda heads: heads * mask[:, None, :, None].astype(heads.dtype)

    return {
        place.format(i): scaled(masks[k, i])
        for k, place in enumerate(KINDS.values())
        for i in range(masks.shape[1])
    }


def train(arguments: argparse.Namespace, seed: int) -> tuple[TextModel, dict[str, Any]]:
    """Train a model unless it already exists, and return it with the files of each part."""
    given = argparse.Namespace(
        set="multi30k", task="seq2seq", data=arguments.data, steps=arguments.steps, d_model=None,
        texts=arguments.runs / "multi30k", out=arguments.runs / f"seed_{seed}",
    )  # fmt: skip
    files = pairs.write_files(given)
    config = pairs.training_config(given, files)
    model = dataclasses.replace(CONFIG, d_model=arguments.width)
    config = dataclasses.replace(config, model=model, seed=seed, eval_every=config.steps, **RECIPE)
    pairs.train(config)
    return load_run(config.out), files


def read_rows(model: TextModel, files: tuple[str, str], count: int) -> Rows:
    """Return the first `count` pairs of a part."""
    assert model.run is not None
    texts = [*zip(*map(pairs.lines, files), strict=True)][:count]
    read = pairs.tokenizers(model)
    found = [pair_example(model.run, read, Pair(*one, files[0])) for one in texts]
    source, valid = stack_rows([np.asarray(one.source) for one in found])
    positions = np.where(True if valid is None else valid, np.arange(source.shape[1])[None], -1)
    tokens, _ = stack_rows([np.asarray(one.tokens) for one in found])
    labels, valid = stack_rows([np.asarray(one.labels) for one in found])
    labels = labels if valid is None else np.where(valid, labels, IGNORE)
    return Rows(source, positions.astype(np.int32), tokens, labels, [text for _, text in texts])


@partial(jax.jit, static_argnames=("config", "start", "stop"))
def write(
    config: tj.ModelConfig,
    params: Any,
    masks: jax.Array,  # f32[3, L, N]
    source: jax.Array,  # i32[B, S]
    positions: jax.Array,  # i32[B, S]
    start: int,
    stop: tuple[int, ...],
) -> jax.Array:  # i32[B, LONGEST]
    """Generate the targets of sources with masked heads by greedy decoding."""
    model = tj.build(config).edited(edits(masks[:, :, None]))
    state = init_decode_state(
        model, params, len(source), LONGEST, source=source, source_valid=positions >= 0
    )
    prompt = jnp.full((len(source), 1), start, jnp.int32)
    return tj.generate(
        tj.make_step(model), params, prompt, state, num_tokens=LONGEST, stop=stop
    ).tokens


def bleu(model: TextModel, rows: Rows, masks: np.ndarray) -> float:
    """Return the BLEU of the translations with masked heads."""
    target = target_of(model.tokenizer)
    ids = np.asarray(
        write(model.config, model.params, jnp.asarray(masks, jnp.float32), rows.source,
              rows.positions, target.start, target.stop)
    )  # fmt: skip
    kept = (row[(row >= 0) & ~np.isin(row, target.stop)].tolist() for row in ids)
    texts = [model.tokenizer.to_bytes(row).decode() for row in kept]
    return compare_texts(texts, rows.texts)["bleu"]


def importance(model: TextModel, rows: Rows) -> np.ndarray:  # f32[3, L, N]
    """Return the importance of each head for log p, relative to the heads of its layer."""
    built, config = tj.build(model.config), model.config
    size = len(KINDS), config.num_layers, config.num_heads

    @jax.jit
    def slopes(params: Any, source: Any, positions: Any, tokens: Any, labels: Any) -> jax.Array:
        def total(masks: jax.Array) -> jax.Array:
            given = dict(source=source, source_positions=positions)
            logits = built.edited(edits(masks)).apply({"params": params}, tokens, **given)[0]
            mean, count = tj.cross_entropy(logits, labels, ignore_label=IGNORE)
            return mean * count

        ones = jnp.ones((*size[:2], len(tokens), size[2]))  # one mask per pair
        return jnp.abs(jax.grad(total)(ones)).sum(axis=2)

    summed, used = np.zeros(size), 0
    for first in range(0, len(rows.source), ROWS):
        part = [x[first : first + ROWS] for x in rows[:4]]
        summed, used = summed + np.asarray(slopes(model.params, *part)), used + len(part[0])
    found = summed / used
    return found / np.linalg.norm(found, axis=-1, keepdims=True)


class Words(NamedTuple):
    """Probabilities p(target word | source word) in IBM's model 1 for the pairs that co-occur."""

    codes: np.ndarray  # i64[n], sorted: source word * V + target word
    p: np.ndarray  # f64[n]
    size: int
    """Vocabulary size, V."""


def fit_words(source: np.ndarray, positions: np.ndarray, labels: np.ndarray) -> Words:
    """Fit IBM's model 1 with five rounds of expectation maximization."""
    size = int(labels.max()) + 1
    together = (positions >= 0)[:, :, None] & (labels != IGNORE)[:, None, :]
    row, s, t = np.nonzero(together)
    codes = source[row, s].astype(np.int64) * size + labels[row, t]
    known, at = np.unique(codes, return_inverse=True)
    word = row * labels.shape[1] + t  # the target word of each pair
    p = np.ones(len(known))
    for _ in range(5):
        share = p[at] / np.bincount(word, p[at], labels.size)[word]
        counts = np.bincount(at, share, len(known))
        p = counts / np.bincount(known // size, counts)[known // size]
    return Words(known, p, size)


def links(words: Words, rows: Rows, end: Sequence[int]) -> np.ndarray:  # i32[n, 3]: row, s, t
    """Return the source word that each target word translates, if this is clear.

    Two words are linked if each is the most likely translation of the other and p is above CLEAR.
    End tokens and unknown words, 0, are not linked.
    """
    codes = rows.source[:, :, None].astype(np.int64) * words.size + rows.labels[:, None, :]
    at = np.minimum(np.searchsorted(words.codes, codes), len(words.codes) - 1)
    there = (rows.positions >= 0)[:, :, None] & (rows.source > 0)[:, :, None]
    there = there & ((rows.labels > 0) & ~np.isin(rows.labels, end))[:, None, :]
    p = np.where(there & (words.codes[at] == codes), words.p[at], 0)
    best = (p == p.max(axis=1, keepdims=True)) & (p == p.max(axis=2, keepdims=True))
    return np.argwhere(best & (p > CLEAR)).astype(np.int32)


def aligned(model: TextModel, rows: Rows, linked: np.ndarray) -> np.ndarray:  # f32[L, N]
    """Return the fraction of links on which each cross-attention head has its largest weight.

    A word is generated at the previous token, so the weights of that token are used.
    """
    config = model.config
    names = [f"block_{i}/cross_attention/weights" for i in range(config.num_layers)]
    apply = jax.jit(partial(tj.build(config).apply, capture=tuple(names)))
    given = dict(source=rows.source, source_positions=rows.positions)
    found = apply({"params": model.params}, rows.tokens, **given)[2]
    most = np.stack([np.argmax(np.asarray(found[name]), axis=-1) for name in names])  # [L, B, N, T]
    row, s, t = linked.T
    return (most[:, row, :, t] == s[:, None, None]).mean(axis=0)


def measure(arguments: argparse.Namespace, seed: int) -> Found:
    """Train a translation model and prune it."""
    model, files = train(arguments, seed)
    test = read_rows(model, files["test"], arguments.sentences)
    val = read_rows(model, files["val"], 2 * arguments.sentences)
    every = read_rows(model, files["train"], pairs.ALL)
    whole = np.ones((len(KINDS), model.config.num_layers, model.config.num_heads))
    judge = partial(bleu, model, test)

    def without(heads: np.ndarray) -> float:  # head numbers, counted over all kinds
        masks = whole.copy()
        masks.ravel()[heads] = 0
        return judge(masks)

    words = fit_words(every.source, every.positions, every.labels)
    on_links = aligned(model, test, links(words, test, target_of(model.tokenizer).stop))
    by_links = np.argsort(-on_links, axis=None, kind="stable") + 2 * on_links.size
    count = min(int((on_links > ALIGNED).sum()), on_links.size // 2)
    matters = importance(model, val)
    order = np.argsort(matters, axis=None, kind="stable")
    chance = np.random.default_rng(seed).permutation(whole.size)
    steps = range(0, whole.size + 1, max(1, whole.size // 12))
    of_kind = {}
    for k, kind in enumerate(KINDS):
        own = order[order // on_links.size == k]
        of_kind[kind] = without(own[: len(own) - len(own) // 4])
    log = RunFolder(arguments.runs / f"seed_{seed}").read_metrics()
    return Found(
        bleu=judge(whole),
        aligned=on_links,
        without_aligned=without(by_links[:count]),
        without_others=without(by_links[len(by_links) - count :]),
        single=np.reshape([without(np.array([h])) for h in range(whole.size)], whole.shape),
        importance=matters,
        order=order,
        pruned=np.array([[without(heads[:n]) for n in steps] for heads in (order, chance)]),
        of_kind=of_kind,
        minutes=sum(line["seconds"] for line in log) / 60,
    )


def share_that_goes(curve: np.ndarray) -> float:
    """Return the fraction of heads that can be pruned before BLEU decreases by LOSS."""
    lost = np.append(curve[0] - curve > LOSS, True)
    return (int(np.argmax(lost)) - 1) / (len(curve) - 1)


def main(argv: Sequence[str] | None = None) -> list[Found]:
    """Run the command and return the measurements for each seed."""
    logging.getLogger("sacrebleu").setLevel(logging.ERROR)  # it warns about tokenized texts
    folders = {"data": "that of multi30k", "runs": "where translators are trained"}
    arguments = read_arguments(__doc__, argv, folders, steps=1500, width=128, sentences=500)
    found = [measure(arguments, seed) for seed in arguments.seeds]
    heads, middle = found[0].aligned.size, found[0].pruned.shape[1] // 2
    best = [np.unravel_index(x.aligned.argmax(), x.aligned.shape)[0] for x in found]
    rows: list[Any] = [
        ("BLEU with all heads", "", [x.bleu for x in found]),
        ("best head on the source: links", "", [x.aligned.max() for x in found]),
        ("its layer, from 0", "before the last", best),
        (f"alignment heads of {heads}", "few", [(x.aligned > ALIGNED).sum() for x in found]),
        ("BLEU without them, at most half", "low", [x.without_aligned for x in found]),
        ("BLEU without as many others", "higher", [x.without_others for x in found]),
    ]
    for k, kind in enumerate(KINDS):
        lost = [x.bleu - x.single[k] for x in found]
        claim = "most" if kind == "source" else "few"
        rows += [
            (f"{kind}: of {heads}, cost {LOSS:g} BLEU", claim, [(x > LOSS).sum() for x in lost]),
            (f"{kind}: the most that one costs", "", [x.max() for x in lost]),
        ]
    scores = [(x.importance.ravel(), x.bleu - x.single.ravel()) for x in found]
    agree = [np.corrcoef(*pair)[0, 1] for pair in scores]
    rows.append(("correlation of importance and cost", "", agree))
    half = [np.bincount(x.order[: len(x.order) // 2] // heads, minlength=3) for x in found]
    for k, (kind, claim) in enumerate(zip(KINDS, ("most", "", "fewest"), strict=True)):
        rows.append((f"{kind}: of the half that goes first", claim, [x[k] for x in half]))
    for i, claims in enumerate((("0.2 to 0.4", ""), ("less", "lower"))):
        name = "at random" if i else "by importance"
        goes = [share_that_goes(x.pruned[i]) for x in found]
        rows.append((f"share that goes for {LOSS:g} BLEU, {name}", claims[0], goes))
        left = [x.pruned[i, middle] for x in found]
        rows.append((f"BLEU with half of the heads, {name}", claims[1], left))
    for kind, claim in zip(KINDS, ("usable", "usable", "near 0"), strict=True):
        left = [x.of_kind[kind] for x in found]
        rows.append((f"{kind}: BLEU with a quarter of them", claim, left))
    rows.append(("minutes of training", "", [x.minutes for x in found]))
    print_figures(arguments, rows)
    if arguments.out:
        draw_picture(arguments, found)
    return found


def draw_picture(arguments: argparse.Namespace, found: list[Found]) -> None:
    """Plot the cost of pruning each head individually, and BLEU by the fraction of heads left."""
    figure, plots = new_figure(2)
    for k, (kind, color) in enumerate(zip(KINDS, COLOURS, strict=False)):
        lost = np.sort(np.stack([(x.bleu - x.single[k]).ravel() for x in found]))[:, ::-1]
        plots[0].plot(lost.T, "o", ms=3, color=color)
        plots[0].plot(lost.mean(axis=0), color=color, label=kind)
    label(plots[0], "BLEU lost without one head", "heads, the costliest first", "BLEU")
    left = np.linspace(1, 0, found[0].pruned.shape[1])
    for i, name in enumerate(("by importance", "in random order")):
        for n, x in enumerate(found):
            plots[1].plot(left, x.pruned[i], color=COLOURS[i], label=None if n else name)
    label(plots[1], "heads pruned", "share of heads left", "BLEU")
    plots[1].invert_xaxis()
    save_picture(figure, arguments, "pruning")


if __name__ == "__main__":
    main()
