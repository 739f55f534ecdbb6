"""Compare random folders of published tokenizers with `transformers`.

    python -m tests.tokenizers.fuzz_folders --minutes 1 --seed 0

A case consists of a family, the files in its folder, and their content: class, roles and options.
Ids and roles must be equal, unless the folder is refused with an error that names it.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from tests.support import published_folders
from tests.support.published_text import transformers
from transformer_jax.pretrained.families import FAMILIES
from transformer_jax.tokenizers.classes import CLASSES
from transformer_jax.tokenizers.utf8 import DataError

NEEDS_SENTENCEPIECE = {"marian", "m2m_100"}
"""Families whose class needs a package; without it, transformers uses a different class."""
BUILT_FROM_FILES = {"Bert", "MPNet", "GPT2", "Roberta"}
ENDS = dict(add_bos_token=(True, False), add_eos_token=(True, False))
LETTERS = [*"abcthe THE12.,'", "\u00e9", "e\u0301", "\u4e2d", "\n", "  ", "the ", "``"]


def some(rng, options):
    """Draw a random subset of the options, with random values."""
    return {n: v[rng.integers(len(v))] for n, v in options.items() if rng.integers(2)}


def draw(rng):
    kinds = sorted(FAMILIES)
    model_type = kinds[rng.integers(len(kinds))]
    kind = published_folders.USUAL[model_type]
    if model_type == "mbart" and rng.integers(2):
        kind = "MBart50"
    names = [None, None, kind + "Tokenizer", kind + "TokenizerFast", "PreTrainedTokenizerFast"]
    named = names[rng.integers(len(names))]
    if kind == "MBart50" or (model_type in NEEDS_SENTENCEPIECE and kind == "Nllb"):
        named = kind + "Tokenizer"
    usual = dict(CLASSES[kind].roles)
    tokens = sorted(set(usual.values()))
    roles = {r: t for r, t in usual.items() if rng.integers(3) == 0}
    mapped = {r: t for r, t in usual.items() if rng.integers(2)} if rng.integers(3) == 0 else {}
    if rng.integers(4) == 0:
        framing = {role for part in CLASSES[kind].frame or () for role in part}
        free = sorted({"bos", "eos", "pad", "mask"} - framing)
        role = free[rng.integers(len(free))]
        roles[role] = [None, *tokens][rng.integers(len(tokens) + 1)]
    decoder = not mapped and bool(rng.integers(2))  # with it, transformers ignores the map
    ends = some(rng, ENDS) if rng.integers(3) == 0 else {}
    return published_folders.Layout(
        model_type, kind, named, some(rng, published_folders.OPTIONS.get(kind, {})) | ends,
        some(rng, published_folders.OPTIONS.get(kind, {})), roles, mapped,
        decoder=decoder,
        whole=kind not in BUILT_FROM_FILES or bool(rng.integers(3)),
        framed=bool(rng.integers(4)), listed=bool(rng.integers(4)),
        model_names_it=rng.integers(3) == 0,
    )  # fmt: skip


def case(seed, texts=9):
    """Check one folder and return its family and outcome. AssertionError shows the differences."""
    rng = np.random.default_rng(seed)
    layout = draw(rng)
    drawn = tuple("".join(rng.choice(LETTERS, rng.integers(0, 17))) for _ in range(texts))
    with tempfile.TemporaryDirectory() as name:
        folder = published_folders.folder_of(layout, Path(name, "model"))
        try:
            found = published_folders.differences(folder, drawn)
        except DataError as error:
            return layout.model_type, f"refused: {str(error).removeprefix(str(folder))}"
        except published_folders.NotReadByTransformers as error:
            return layout.model_type, f"not read by transformers: {error}"
        assert not found, (layout, found[:3])
    return layout.model_type, "equal"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    end, seed, failed, equal = time.perf_counter() + args.minutes * 60, args.seed, [], Counter()
    refused = Counter()
    while time.perf_counter() < end:
        try:
            family, outcome = case(seed)
            equal[family] += outcome == "equal"
            refused[outcome] += outcome != "equal"
        except Exception as error:  # also errors of transformers, which must read published folders
            failed.append(f"seed {seed}: {type(error).__name__}: {error}")
            print(failed[-1], flush=True)
        seed += 1
    print(f"{seed - args.seed} folders from seed {args.seed} on: {len(failed)} wrong")
    print("equal:", ", ".join(f"{name} {count}" for name, count in sorted(equal.items())))
    for why, count in refused.most_common():
        if count:
            print(count, why)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
