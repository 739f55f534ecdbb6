"""Train a small translator from French to English, and draw what it looks at for each word.

    python -m transformer_jax demo alignment

A bidirectional GRU reads the French words, and a GRU with additive attention writes the English
ones (Bahdanau et al. 2015). The sentences are all those of a small grammar; a token is a word.
After 300 steps the model translates every one of them. Row i of the alignment has the decoder's
attention weights over the French words j when it writes word i:

    a_ij = softmax_j(v . tanh(W_q s_{i-1} + W_k h_j))
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import RecurrentConfig, build, cross_entropy, generate, init_params, make_step
from transformer_jax.config.fields import fail
from transformer_jax.lectures.demos.shared import (
    Options,
    draw_matrix,
    label,
    new_figure,
    print_table,
    save_picture,
    train,
)
from transformer_jax.lectures.recurrent import RecurrentSeq2Seq

OPTIONS: Options = {"sentence": (None, None), "width": (24, 24), "seed": (0, 0)}

BE = {
    "je suis": "i am", "tu es": "you are", "il est": "he is", "elle est": "she is",
    "nous sommes": "we are", "ils sont": "they are",
}  # fmt: skip
HAVE = {
    "j' ai": "i have", "tu as": "you have", "il a": "he has", "elle a": "she has",
    "nous avons": "we have", "ils ont": "they have",
}  # fmt: skip
ONE = {
    "étudiant": "a student", "professeur": "a teacher", "médecin": "a doctor",
    "fatigué": "tired", "content": "happy",
}  # fmt: skip
MANY = {
    "étudiants": "students", "professeurs": "teachers", "médecins": "doctors",
    "fatigués": "tired", "contents": "happy",
}  # fmt: skip
ANIMALS = {"chat": "cat", "chien": "dog", "cheval": "horse"}
COLOURS = {"noir": "black", "blanc": "white", "gris": "grey"}
SHOWN = ("je suis étudiant", "nous avons un chat noir")
START, END = "<s>", "</s>"


def sentence_pairs() -> list[tuple[str, str]]:
    """Return the sentences of the grammar, French and English."""
    pairs = []
    for subject, said in BE.items():
        others = MANY if subject in ("nous sommes", "ils sont") else ONE
        pairs += [(f"{subject} {fr}", f"{said} {en}") for fr, en in others.items()]
    for subject, said in HAVE.items():
        for animal, name in ANIMALS.items():
            pairs += [
                (f"{subject} un {animal} {fr}", f"{said} a {en} {name}")
                for fr, en in COLOURS.items()
            ]
    return pairs


def encode(sentences: list[list[str]]) -> tuple[list[str], np.ndarray]:
    """Return the vocabulary, and the sentences as ids i32[B, T] of it, -1 after their ends."""
    words = sorted({word for sentence in sentences for word in sentence})
    longest = max(map(len, sentences))
    ids = [[words.index(word) for word in sentence] for sentence in sentences]
    return words, np.array([row + [-1] * (longest - len(row)) for row in ids], np.int32)


def translate(
    config: RecurrentConfig,
    params: Any,
    source: np.ndarray,  # i32[B, S]; -1 is padding
    start: int,
    end: int,
    num_tokens: int,
) -> tuple[list[np.ndarray], np.ndarray]:  # a row's words, f32[B, T, S]
    """Return the likeliest translations, and the attention weights of each of their words."""
    model, valid = RecurrentSeq2Seq(config), source >= 0
    known = {"params": params}
    state = model.apply(known, np.maximum(source, 0), valid=valid, method="init_state")
    prompt = np.full((len(source), 1), start)
    place = "attention/weights"
    text = generate(
        make_step(model), params, prompt, state, num_tokens=num_tokens, stop=end, capture=(place,)
    )
    assert text.captured is not None
    return text.rows(), np.asarray(text.captured[place])


def demonstrate(arguments: Namespace) -> dict[str, Any]:
    """Run the demonstration; return the share translated, and words and weights by sentence."""
    pairs = sentence_pairs()
    shown = SHOWN if arguments.sentence is None else (arguments.sentence,)
    french, source = encode([fr.split() for fr, _ in pairs])
    english, target = encode([[START, *en.split(), END] for _, en in pairs])
    config = RecurrentConfig(
        vocab_size=len(english), source_vocab_size=len(french), d_embed=arguments.width,
        d_hidden=arguments.width, cell="gru", bidirectional=True, attention="additive",
    )  # fmt: skip
    for word in " ".join(shown).split():
        if word not in french:
            fail("sentence", arguments.sentence, f"{word!r} is not one of {', '.join(french)}")
    model, valid = build(config), source >= 0

    def loss(params: Any, _: Any) -> jax.Array:
        read, write = jnp.maximum(source, 0), jnp.maximum(target[:, :-1], 0)
        # every step reads all sentences: the corpus is one batch
        logits, _ = model.apply({"params": params}, write, source=read, source_valid=valid)
        return cross_entropy(logits, jnp.asarray(target[:, 1:]), ignore_label=-1)[0]

    steps = 120 if arguments.quick else 300
    params = init_params(config, jax.random.key(arguments.seed))
    params, losses = train(loss, params, np.zeros(steps), learning_rate=0.02)
    start, end = english.index(START), english.index(END)
    asked = [[french.index(word) for word in sentence.split()] for sentence in shown]
    longest = max(source.shape[1], *map(len, asked))
    read = np.full((len(source) + len(asked), longest), -1, np.int32)
    for row, ids in zip(read, [*source.tolist(), *asked], strict=True):
        row[: len(ids)] = ids
    rows, weights = translate(config, params, read, start, end, target.shape[1] - 1)
    wanted = [row[row >= 0][1:] for row in target]
    right = np.mean([np.array_equal(a, b) for a, b in zip(rows, wanted, strict=False)])
    print(f"{len(pairs)} sentences; loss {losses[-1]:.4f} nats a word; {right:.0%} translated")
    found: dict[str, Any] = {"right": right}
    for i, sentence in enumerate(shown, len(pairs)):
        words = [english[token] for token in rows[i]]
        found[sentence] = words, weights[i, : len(words), : len(sentence.split())]
        print_table([" ".join(words[:-1]), *sentence.split()], [
            [word, *(f"{w:.2f}" for w in row)] for word, row in zip(*found[sentence], strict=True)
        ])  # fmt: skip
    figure, plots = new_figure(len(shown))
    for axes, sentence in zip(plots, shown, strict=True):
        words, matrix = found[sentence]
        draw_matrix(axes, matrix, words, sentence.split())
        label(axes, f"“{sentence}”", "read: French", "written: English", legend=False)
    save_picture(figure, arguments, "alignment")
    return found
