"""Train a small language model and find the words with similar embeddings.

    python -m transformer_jax demo embeddings

The sentences come from a small grammar, in which kings and queens rule and walk, and cats and dogs
eat and run. A feed-forward model of the last three words (Bengio et al. 2003) is trained on four
fifths of the sentences. The angle between the vectors of words that occur in the same contexts
becomes small, so the model generalizes from one word to the other:

    cos(a, b) = a . b / (|a| |b|)

N-gram counts do not generalize. A word that never followed the same three words has probability 0.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import WindowConfig, build, cross_entropy, init_params
from transformer_jax.lectures.demos.shared import (
    COLOURS,
    Options,
    check_least,
    draw_matrix,
    label,
    new_figure,
    print_table,
    save_picture,
    train,
)

OPTIONS: Options = {"width": (16, 16), "seed": (0, 0)}

GROUPS = {
    "crowned": "king queen prince princess",
    "at work": "farmer baker doctor teacher",
    "animal": "cat dog horse cow",
    "motion": "walks runs goes",
    "place": "castle river village market",
    "food": "bread fruit meat",
}
"""Groups of words that occur in the same contexts."""
WORDS = {name: words.split() for name, words in GROUPS.items()}
START, CONTEXT = "<s>", 3


def sentences() -> list[list[str]]:
    """Return all sentences of the grammar, in a fixed order."""
    people = WORDS["crowned"] + WORDS["at work"]
    living = people + WORDS["animal"]
    texts = [
        f"the {who} {how} to the {where}"
        for who, how, where in product(living, WORDS["motion"], WORDS["place"])
    ]
    texts += [
        f"the {who} rules the {where}" for who, where in product(WORDS["crowned"], WORDS["place"])
    ]
    texts += [
        f"the {who} sells the {what}" for who, what in product(WORDS["at work"], WORDS["food"])
    ]
    texts += [f"the {who} eats the {what}" for who, what in product(living, WORDS["food"])]
    texts += [f"the {who} has a {pet}" for who, pet in product(people, WORDS["animal"])]
    return [text.split() for text in texts]


def windows(texts: list[list[str]], vocabulary: list[str]) -> np.ndarray:  # i32[M, CONTEXT + 1]
    """Return a row for each word of each text, with the CONTEXT previous words before it."""
    rows = []
    for text in texts:
        ids = [vocabulary.index(word) for word in [START] * CONTEXT + text]
        rows += [ids[i : i + CONTEXT + 1] for i in range(len(text))]
    return np.array(rows, np.int32)


def share_never_counted(training: np.ndarray, held_out: np.ndarray) -> float:
    """Return the fraction of held-out 4-grams that do not occur in `training`."""
    counts = Counter(map(tuple, training.tolist()))
    return float(np.mean([tuple(row) not in counts for row in held_out.tolist()]))


def cosines(vectors: np.ndarray) -> np.ndarray:  # [V, E] -> [V, V]
    """Return the cosine similarity of each pair of vectors."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit @ unit.T


def learn(
    training: np.ndarray, held_out: np.ndarray, words: int, steps: int, seed: int, width: int
) -> Any:
    """Return the trained table [V, E] and the loss and lowest probability of the held-out words."""
    config = WindowConfig(
        vocab_size=words, context=CONTEXT, d_embed=width, d_hidden=width, tie_embeddings=True
    )
    model = build(config)

    def logits_of(params: Any, rows: jax.Array) -> jax.Array:  # i32[M, C + 1] -> f32[M, V]
        return model.apply({"params": params}, rows[:, :-1])[0][:, -1]

    def loss(params: Any, rows: jax.Array) -> jax.Array:
        return cross_entropy(logits_of(params, rows)[:, None], rows[:, -1:])[0]

    draw = np.random.default_rng(seed)
    batches = training[draw.integers(0, len(training), (steps, 64))]
    params = init_params(config, jax.random.key(seed))
    params, _ = train(loss, params, batches, learning_rate=0.02)
    probabilities = jax.nn.softmax(jax.jit(logits_of)(params, jnp.asarray(held_out)))
    right = np.asarray(probabilities)[np.arange(len(held_out)), held_out[:, -1]]
    return np.asarray(params["embed"]["tokens"]), float(-np.log(right).mean()), float(right.min())


def draw(table: np.ndarray, vocabulary: list[str], similarity: np.ndarray, arguments: Any) -> None:
    """Plot the first two principal components of the vectors and some cosines."""
    every = [word for words in WORDS.values() for word in words]
    at = [vocabulary.index(word) for word in every]
    centred = table[at] - table[at].mean(axis=0)
    # the rows of V^T are the principal components, in descending order
    plane = centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T  # [M, 2]
    figure, (left, right) = new_figure(2, height=4.4)
    for words, colour in zip(WORDS.values(), COLOURS, strict=True):
        points = plane[[every.index(word) for word in words]]
        left.plot(*points.T, "o", color=colour, label=", ".join(words[:3]), ms=5)
    label(left, "Vectors of words, in a plane", "first component", "second component")
    some = ["king", "queen", "farmer", "cat", "walks", "runs"]
    rows = [vocabulary.index(word) for word in some]
    draw_matrix(right, np.clip(similarity[np.ix_(rows, rows)], 0, 1), some, some, False)
    right.tick_params(axis="x", rotation=60)
    label(right, "Cosine of two words: white 0 or less, blue 1", "", "", legend=False)
    save_picture(figure, arguments, "embeddings")


def demonstrate(arguments: Namespace) -> dict[str, Any]:
    """Run the demonstration. Return the cosines for each seed and the held-out results."""
    check_least("width", arguments.width, 2, "the vectors are drawn in a plane")
    first, steps = arguments.seed, 400 if arguments.quick else 1500
    seeds = range(first, first + (1 if arguments.quick else 5))
    texts = sentences()
    # the split does not depend on the seed, so the results of all seeds are comparable
    order = np.random.default_rng(0).permutation(len(texts))
    cut = len(texts) // 5
    vocabulary = sorted({START} | {word for text in texts for word in text})
    held_out, training = (
        windows([texts[i] for i in part], vocabulary) for part in (order[:cut], order[cut:])
    )
    never = share_never_counted(training, held_out)
    pairs = [("king", "queen"), ("king", "farmer"), ("king", "cat"), ("king", "walks"),
             ("runs", "walks"), ("runs", "bread")]  # fmt: skip
    found: dict[str, Any] = {"never counted": never, "vocabulary": vocabulary, "pairs": {}}
    tables, losses, least = zip(
        *(
            learn(training, held_out, len(vocabulary), steps, seed, arguments.width)
            for seed in seeds
        ),
        strict=True,
    )
    similarity = np.stack([cosines(table) for table in tables])
    found |= {"cosines": similarity, "losses": losses, "least": least, "tables": tables}
    for a, b in pairs:
        found["pairs"][a, b] = similarity[:, vocabulary.index(a), vocabulary.index(b)]
    print(f"{len(texts)} sentences, {cut} held out; {len(vocabulary)} words; seeds {len(seeds)}")
    print_table(["cosine", "mean", "min", "max"], [
        [f"{a}, {b}", *(f"{f(x):.2f}" for f in (np.mean, np.min, np.max))]
        for (a, b), x in found["pairs"].items()
    ])  # fmt: skip
    for word in ("king", "runs", "bread"):
        # the first word is the word itself
        nearest = np.argsort(-similarity[0, vocabulary.index(word)])[1:4]
        print(f"nearest to {word}:", ", ".join(vocabulary[i] for i in nearest))
    print(f"held-out words with probability 0 by 4-gram counts: {never:.1%}")
    print(
        f"lowest probability of a held-out word by the network: {min(least):.4f}; loss "
        f"{np.mean(losses):.3f} nats per word ({min(losses):.3f} to {max(losses):.3f})"
    )
    draw(tables[0], vocabulary, similarity[0], arguments)
    return found
