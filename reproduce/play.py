"""Train the small model whose attention is shown on the page docs/play, and write its weights.

    python -m reproduce.play

A two-layer decoder reads generated sentences about animals and their sounds:

    the old dogs near the tree bark . they sleep . the bird behind the cats sings .

A token is a word. The subject, not the noun before the verb, determines the verb and its number
(subject-verb agreement, Linzen et al. 2016), so a head must look past that noun. Weights are
rounded to thousandths and written as integers to docs/play/model.js. This file assigns JSON to a
variable, because a page that is opened as a file can load scripts but not JSON. The command prints
the fraction of verbs after a second noun that the rounded weights predict correctly.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from transformer_jax import ModelConfig, build, cross_entropy, init_params
from transformer_jax.config import T5Buckets
from transformer_jax.lectures.demos.shared import train

OUT = Path(__file__).parents[1] / "docs" / "play" / "model.js"
BEGIN, END = "globalThis.PLAY_MODEL =\n", ";\n"
SOUNDS = {"bird": "sing", "cat": "purr", "dog": "bark", "frog": "croak"}
PLACES = ("house", "tree")
PREPOSITIONS, ADJECTIVES = ("behind", "near", "under"), ("old", "small")
VERBS = ("eat", "run", "sleep")
WORDS = (
    ".", "the", "it", "they", *PREPOSITIONS, *ADJECTIVES,
    *(word + s for word in (*SOUNDS, *PLACES, *SOUNDS.values(), *VERBS) for s in ("", "s")),
)  # fmt: skip
EXAMPLES = (
    "the old dogs near the tree",
    "the bird behind the cats sings . it",
    "the frog croaks . the small cats under the old house",
    "the dogs bark . they sleep . the cat near the dogs",
)
SUBJECT = 2
"""Position of the subject in the first example. The page initially shows a head that attends to
it."""
LONGEST = 40
CONFIG = ModelConfig(
    vocab_size=len(WORDS), d_model=40, num_layers=2, num_heads=4, head_dim=16, d_ff=80,
    max_len=LONGEST, positions=T5Buckets(buckets=2 * LONGEST, max_distance=2 * LONGEST),
    norm="rmsnorm", use_bias=False, init_std=0.15,
)  # fmt: skip
SCALE = 1000
"""Factor by which weights are multiplied before rounding."""


def story(random: np.random.Generator) -> list[str]:
    """Return the words of sentences, with * before each verb that follows a second noun."""

    def phrase(nouns: Sequence[str], many: bool) -> list[str]:
        adjective = [str(random.choice(ADJECTIVES))] if random.random() < 0.4 else []
        return ["the", *adjective, str(random.choice(nouns)) + "s" * many]

    words: list[str] = []
    while len(words) < LONGEST:
        many, second = (bool(x) for x in random.integers(0, 2, 2))
        subject = phrase([*SOUNDS], many)
        verb = SOUNDS[subject[-1].removesuffix("s") if many else subject[-1]] + "s" * (not many)
        words += subject
        if random.random() < 0.7:
            words += [str(random.choice(PREPOSITIONS)), *phrase([*SOUNDS, *PLACES], second)]
            verb = f"*{verb}"
        words += [verb, "."]
        if random.random() < 0.4:
            words += ["they" if many else "it", str(random.choice(VERBS)) + "s" * (not many), "."]
    return words[:LONGEST]


def stories(
    random: np.random.Generator, count: int
) -> tuple[np.ndarray, np.ndarray]:  # i32[count, LONGEST], bool[count, LONGEST]
    """Return the word IDs, and whether each word is a verb that follows a second noun."""
    told = [story(random) for _ in range(count)]
    ids = [[WORDS.index(word.removeprefix("*")) for word in words] for words in told]
    follow = [[word.startswith("*") for word in words] for words in told]
    return np.array(ids, np.int32), np.array(follow)


def written(params: Any) -> str:
    """Return the text of model.js."""
    weights = {
        "/".join(path): {
            "shape": x.shape,
            "values": np.rint(x * SCALE).astype(int).ravel().tolist(),
        }
        for path, x in flatten_dict(jax.tree.map(np.asarray, params)).items()
    }
    names = ("d_model", "num_layers", "num_heads", "head_dim", "d_ff", "max_len", "norm_eps")
    config = {name: getattr(CONFIG, name) for name in names}
    model = dict(config=config, words=WORDS, examples=EXAMPLES, subject=SUBJECT, scale=SCALE)
    model["weights"] = weights
    return BEGIN + json.dumps(model, separators=(",", ":")) + END


def read(text: str) -> tuple[dict[str, Any], Any]:
    """Return the content of model.js, and its weights as parameters for `CONFIG`."""
    model = json.loads(text.removeprefix(BEGIN).removesuffix(END))
    flat = {
        tuple(name.split("/")): jnp.array(x["values"], jnp.float32).reshape(x["shape"]) / SCALE
        for name, x in model["weights"].items()
    }
    return model, unflatten_dict(flat)


def main(argv: Sequence[str] | None = None) -> float:
    """Run the command and return the fraction of correct predictions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args(argv)
    random, model = np.random.default_rng(arguments.seed), build(CONFIG)
    ids, follow = stories(random, arguments.steps * arguments.batch)
    batches = [x.reshape(arguments.steps, arguments.batch, LONGEST) for x in (ids, follow)]

    def loss(params: Any, batch: Any) -> jax.Array:
        """Return nats per word, with half of the weight on the verbs that follow a second noun."""
        ids, follow = batch
        logits, _ = model.apply({"params": params}, ids[:, :-1])
        known = jnp.where(follow[:, 1:], ids[:, 1:], -1)
        parts = [cross_entropy(logits, x, ignore_label=-1)[0] for x in (known, ids[:, 1:])]
        return 0.5 * parts[0] + 0.5 * parts[1]

    params = init_params(CONFIG, jax.random.key(arguments.seed))
    params, losses = train(loss, params, batches, learning_rate=5e-3)
    text = written(params)
    ids, follow = stories(random, 500)
    logits, _ = model.apply({"params": read(text)[1]}, ids[:, :-1])
    right = np.asarray(logits.argmax(axis=-1)) == ids[:, 1:]
    share = float(right[follow[:, 1:]].mean())
    for step in range(0, arguments.steps, max(1, arguments.steps // 10)):
        print(f"step {step}: loss {losses[step]:.3f}")
    print(f"{share:.1%} of the verbs after a second noun are predicted; {len(text) / 1000:.0f} kB")
    arguments.out.write_text(text)
    return share


if __name__ == "__main__":
    main()
