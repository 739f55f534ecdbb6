"""Train a small French-to-English translator and plot its attention weights.

    python -m transformer_jax demo alignment

A bidirectional GRU reads the French words, and a GRU with additive attention writes the English
words (Bahdanau et al. 2015). The data consists of all sentences of a small grammar. After 300
steps, the model translates all of them correctly. Row i of the alignment contains the decoder's
attention weights over the French words j when the decoder writes word i:

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
EXAMPLES = ("je suis étudiant", "nous avons un chat noir")
START, END = "<s>", "</s>"


def sentence_pairs() -> list[tuple[str, str]]:
    """Return all French sentences of the grammar together with their translations."""
    pairs = []
    for subject, english in BE.items():
        complements = MANY if subject in ("nous sommes", "ils sont") else ONE
        pairs += [(f"{subject} {fr}", f"{english} {en}") for fr, en in complements.items()]
    for subject, english in HAVE.items():
        for animal, name in ANIMALS.items():
            pairs += [
                (f"{subject} un {animal} {fr}", f"{english} a {en} {name}")
                for fr, en in COLOURS.items()
            ]
    return pairs


def encode(sentences: list[list[str]]) -> tuple[list[str], np.ndarray]:
    """Return the vocabulary and the token IDs i32[B, T] of the sentences, padded with -1."""
    words = sorted({word for sentence in sentences for word in sentence})
    longest = max(map(len, sentences))
    ids = [[words.index(word) for word in sentence] for sentence in sentences]
    return words, np.array([row + [-1] * (longest - len(row)) for row in ids], np.int32)


def translate(
    config: RecurrentConfig,
    params: Any,
    source: np.ndarray,  # i32[B, S]; -1 for padding
    start: int,
    end: int,
    num_tokens: int,
) -> tuple[list[np.ndarray], np.ndarray]:  # the IDs of each row, f32[B, T, S]
    """Return the greedy translations and the attention weights for each word."""
    model, valid = RecurrentSeq2Seq(config), source >= 0
    variables = {"params": params}
    state = model.apply(variables, np.maximum(source, 0), valid=valid, method="init_state")
    prompt = np.full((len(source), 1), start)
    place = "attention/weights"
    text = generate(
        make_step(model), params, prompt, state, num_tokens=num_tokens, stop=end, capture=(place,)
    )
    assert text.captured is not None
    return text.rows(), np.asarray(text.captured[place])


def demonstrate(arguments: Namespace) -> dict[str, Any]:
    """Run the demonstration. Return the accuracy, and words and weights keyed by sentence."""
    pairs = sentence_pairs()
    examples = EXAMPLES if arguments.sentence is None else (arguments.sentence,)
    french, source = encode([fr.split() for fr, _ in pairs])
    english, target = encode([[START, *en.split(), END] for _, en in pairs])
    config = RecurrentConfig(
        vocab_size=len(english), source_vocab_size=len(french), d_embed=arguments.width,
        d_hidden=arguments.width, cell="gru", bidirectional=True, attention="additive",
    )  # fmt: skip
    for word in " ".join(examples).split():
        if word not in french:
            fail("sentence", arguments.sentence, f"{word!r} is not one of {', '.join(french)}")
    model, valid = build(config), source >= 0

    def loss(params: Any, _: Any) -> jax.Array:
        read, write = jnp.maximum(source, 0), jnp.maximum(target[:, :-1], 0)
        # the whole corpus is one batch
        logits, _ = model.apply({"params": params}, write, source=read, source_valid=valid)
        return cross_entropy(logits, jnp.asarray(target[:, 1:]), ignore_label=-1)[0]

    steps = 120 if arguments.quick else 300
    params = init_params(config, jax.random.key(arguments.seed))
    params, losses = train(loss, params, np.zeros(steps), learning_rate=0.02)
    start, end = english.index(START), english.index(END)
    # one batch contains the corpus, whose translations are counted, and the examples to plot
    extra = [[french.index(word) for word in sentence.split()] for sentence in examples]
    longest = max(source.shape[1], *map(len, extra))
    read = np.full((len(source) + len(extra), longest), -1, np.int32)
    for row, ids in zip(read, [*source.tolist(), *extra], strict=True):
        row[: len(ids)] = ids
    rows, weights = translate(config, params, read, start, end, target.shape[1] - 1)
    # the model does not write the start token
    wanted = [row[row >= 0][1:] for row in target]
    # not strict, because the last rows are the examples
    right = np.mean([np.array_equal(a, b) for a, b in zip(rows, wanted, strict=False)])
    loss_text = f"loss {losses[-1]:.4f} nats per word"
    print(f"{len(pairs)} sentences; {loss_text}; {right:.0%} translated correctly")
    found: dict[str, Any] = {"right": right}
    for i, sentence in enumerate(examples, len(pairs)):
        words = [english[token] for token in rows[i]]
        found[sentence] = words, weights[i, : len(words), : len(sentence.split())]
        print_table([" ".join(words[:-1]), *sentence.split()], [
            [word, *(f"{w:.2f}" for w in row)] for word, row in zip(*found[sentence], strict=True)
        ])  # fmt: skip
    figure, plots = new_figure(len(examples))
    for axes, sentence in zip(plots, examples, strict=True):
        words, matrix = found[sentence]
        draw_matrix(axes, matrix, words, sentence.split())
        label(axes, f"“{sentence}”", "read: French", "written: English", legend=False)
    save_picture(figure, arguments, "alignment")
    return found
