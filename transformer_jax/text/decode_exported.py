"""Decode with the programs of an exported folder; transformer_jax is not needed.

As decode.py it stands in the folder. It needs jax, flatbuffers and safetensors:

    python FOLDER/decode.py "Once upon a time" --tokens 40    with a tokenizer.json, tokenizers too
    python FOLDER/decode.py 12,5,9 7,3 --tokens 40            two prompts as token ids
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FORMAT = "transformer_jax export 1"
"""The form of the folder, as config.json names it; a folder of another number is refused."""


def decode(folder: str | Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return the `count` likeliest tokens after each prompt, one by one, up to a stop token.

    ValueError where the folder is no such export, or the prompts do not fit it.
    """
    folder = Path(folder)
    about = read_about(folder)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    check_prompts(about, lengths, count)
    check_ids(about, prompts)
    width = min(1 << int(lengths.max() - 1).bit_length(), about["context"])  # few shapes: compiled
    tokens = np.zeros((len(prompts), width), np.int32)  # what is after a prompt is not read
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    prefill, step = load_programs(folder)
    logits, state = prefill(tokens, lengths)
    found = [jnp.argmax(logits, axis=-1)]
    stop = np.array(about["stop"], np.int32)
    ended = np.isin(found[0], stop)
    while len(found) < count and not ended.all():
        logits, state = step(found[-1].astype(jnp.int32), state)
        found.append(jnp.argmax(logits, axis=-1))
        ended |= np.isin(found[-1], stop)
    rows = np.stack(found, axis=1)
    return [row[: _end(row, stop)].tolist() for row in rows]


def load_programs(folder: Path) -> tuple[Any, Any]:
    """Return prefill (tokens, lengths) and step (tokens, state), which give logits and the state.

    A state is given away: its memory becomes that of the next.
    """
    from jax import export
    from safetensors.flax import load_file

    params: dict[str, jax.Array] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        params |= load_file(file)
    calls = [
        export.deserialize(bytearray((folder / f"{name}.jax").read_bytes())).call
        for name in ("prefill", "step")
    ]
    prefill, step = jax.jit(calls[0]), jax.jit(calls[1], donate_argnums=2)
    return lambda *given: prefill(params, *given), lambda *given: step(params, *given)


def read_about(folder: Path) -> dict[str, Any]:
    """Return what config.json says; ValueError where it is no export that this file reads."""
    about = json.loads((folder / "config.json").read_text())
    if about.get("format") != FORMAT:
        raise ValueError(f"{folder}: format is {about.get('format')!r}: must be {FORMAT!r}")
    return about


def check_prompts(about: dict[str, Any], lengths: np.ndarray, count: int) -> None:
    """Raise ValueError where prompts and new tokens do not fit the programs."""
    if not len(lengths) or not lengths.min():
        raise ValueError("a prompt has no tokens: must have one at least")
    if count < 1:
        raise ValueError(f"{count} new tokens: must be 1 at least")
    if about["batch"] not in (None, len(lengths)):
        raise ValueError(f"{len(lengths)} prompts: the programs take {about['batch']}")
    total, context = int(lengths.max()) + count - 1, about["context"]  # the last is not read
    if total > context:
        raise ValueError(f"prompt and new tokens reach length {total}: the context is {context}")


def check_ids(about: dict[str, Any], prompts: Sequence[Sequence[int]]) -> None:
    """Raise ValueError unless all tokens are ids of the vocabulary."""
    for token in (token for prompt in prompts for token in prompt):
        if not isinstance(token, int | np.integer) or not 0 <= token < about["vocab_size"]:
            rule = f"must be an id from 0 to {about['vocab_size'] - 1}"
            raise ValueError(f"a prompt has the token {token!r}: {rule}")


def _end(row: np.ndarray, stop: np.ndarray) -> int:
    """Return how many tokens of a row there are up to its first stop token, which it keeps."""
    at = np.flatnonzero(np.isin(row, stop))
    return int(at[0]) + 1 if len(at) else len(row)


def main() -> None:
    """Print what follows each prompt, as a text, or as ids where there is no tokenizer."""
    folder = Path(__file__).parent
    parser = argparse.ArgumentParser(description="Go on with prompts, greedily.")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="a text, or ids: 12,5,9")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="default: 64")
    given = parser.parse_args()
    if not (folder / "tokenizer.json").exists():
        prompts = [[int(i) for i in prompt.split(",")] for prompt in given.prompts]
        for ids in decode(folder, prompts, given.tokens):
            print(",".join(map(str, ids)))
        return
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first = read_about(folder)["first"]
    texts = [tokenizer.encode(text, add_special_tokens=False).ids for text in given.prompts]
    for ids in decode(folder, [first + text for text in texts], given.tokens):
        print(tokenizer.decode(ids))


if __name__ == "__main__":
    try:
        main()
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"decode.py: {' '.join(str(error).split())}")
