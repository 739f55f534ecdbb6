"""Decode with the programs of an exported folder; transformer_jax is not needed.

As decode.py it stands in the folder. It needs jax, flatbuffers and safetensors:

    python FOLDER/decode.py "Once upon a time" --num-tokens 40 with a tokenizer.json, tokenizers too
    python FOLDER/decode.py 12,5,9 7,3 --num-tokens 40         two prompts as token ids
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FORMAT = "transformer_jax export 1"
"""The form of the folder, as config.json names it; a folder of another number is refused."""


def decode(folder: str | Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return the `count` likeliest tokens after each prompt, one by one, up to a stop token.

    ValueError where the folder is no such export, the prompts do not fit it, or a logit is NaN.
    """
    folder = Path(folder)
    about = read_about(folder)
    check_ids(about, prompts)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    check_prompts(about, lengths, count)
    width = min(1 << int(lengths.max() - 1).bit_length(), about["context"])  # few shapes: compiled
    tokens = np.zeros((len(prompts), width), np.int32)  # what is after a prompt is not read
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    prefill, step = load_programs(folder)
    logits, state = prefill(tokens, lengths)
    stop, ended = np.array(about["stop"], np.int32), np.zeros(len(prompts), bool)
    # A row that has ended is decoded on until all have; what it writes is cut off below.
    found = [likeliest(logits, ended)]
    ended = np.isin(found[0], stop)
    while len(found) < count and not ended.all():
        logits, state = step(found[-1].astype(jnp.int32), state)
        found.append(likeliest(logits, ended))
        ended |= np.isin(found[-1], stop)
    rows = np.stack(found, axis=1)
    return [row[: _end(row, stop)].tolist() for row in rows]


def likeliest(logits: jax.Array, ended: np.ndarray) -> jax.Array:  # [B, V], bool[B] -> i32[B]
    """Return the likeliest token of each row.

    ValueError where the largest logit of a row that has not ended is not finite.
    """
    # a maximum on a CPU loses a NaN of a long row
    top = np.asarray(jnp.max(jnp.where(jnp.isnan(logits), jnp.inf, logits), axis=-1))
    if len(wrong := np.flatnonzero(~np.isfinite(top) & ~ended)):
        raise ValueError(f"prompt {wrong[0]}: the largest logit of a next token is not finite")
    return jnp.argmax(logits, axis=-1)


def load_programs(folder: Path) -> tuple[Any, Any]:
    """Return prefill (tokens, lengths) and step (tokens, state), which give logits and the state.

    A state is given away: its memory becomes that of the next.
    """
    from jax import export
    from safetensors.flax import load_file

    params: dict[str, jax.Array] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        params |= _read(file, load_file)
    calls = [
        # `deserialize` takes a bytearray.
        _read(folder / f"{name}.jax", lambda file: export.deserialize(bytearray(file.read_bytes())))
        for name in ("prefill", "step")
    ]
    prefill, step = jax.jit(calls[0].call), jax.jit(calls[1].call, donate_argnums=2)
    return lambda *given: prefill(params, *given), lambda *given: step(params, *given)


def read_about(folder: Path) -> dict[str, Any]:
    """Return what config.json says; ValueError where it is no export that this file reads."""
    file = folder / "config.json"
    about = _read(file, lambda file: json.loads(file.read_text()))
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        found = about.get("format") if isinstance(about, dict) else about
        raise ValueError(f"{file}: format is {found!r:.80}: must be {FORMAT!r}")
    lacking = {"batch", "context", "first", "stop", "vocab_size"} - about.keys()
    if lacking:
        raise ValueError(f"{file} lacks {', '.join(sorted(lacking))}")
    return about


def _read(file: Path, read: Callable[[Path], Any]) -> Any:
    """Return what a file holds; ValueError that names the file where it is damaged."""
    try:
        return read(file)
    except OSError:
        raise
    # A missing file names itself; what is damaged is reported by its libraries without a name.
    except Exception as error:  # of whatever kind the libraries raise of wrong bytes
        raise ValueError(f"{file} cannot be read: {error or type(error).__name__}") from error


def check_prompts(about: dict[str, Any], lengths: np.ndarray, count: int) -> None:
    """Raise ValueError where prompts and new tokens do not fit the programs."""
    if not len(lengths) or not lengths.min():
        raise ValueError("a prompt has no tokens: must have one at least")
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"{count!r} new tokens: must be an integer of at least 1")
    if about["batch"] not in (None, len(lengths)):
        raise ValueError(f"{len(lengths)} prompts: the programs take {about['batch']}")
    total, context = int(lengths.max()) + count - 1, about["context"]  # the last is not read
    if total > context:
        raise ValueError(f"prompt and new tokens reach length {total}: the context is {context}")


def check_ids(about: dict[str, Any], prompts: Sequence[Sequence[int]]) -> None:
    """Raise ValueError unless prompts are lists of ids of the vocabulary."""
    for prompt in prompts:
        if isinstance(prompt, str) or not hasattr(prompt, "__len__"):
            raise ValueError(f"a prompt is {prompt!r}: must be a list of token ids")
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
    parser.add_argument("--num-tokens", type=int, metavar="N", help="default: 64, or what fits")
    given = parser.parse_args()
    about, file = read_about(folder), folder / "tokenizer.json"
    if file.exists():
        from tokenizers import Tokenizer

        tokenizer = _read(file, lambda file: Tokenizer.from_file(str(file)))
        texts = [tokenizer.encode(text, add_special_tokens=False).ids for text in given.prompts]
        prompts = [about["first"] + text for text in texts]
    else:
        tokenizer, prompts = None, [_ids(prompt) for prompt in given.prompts]
    fits = about["context"] - max(map(len, prompts)) + 1  # the last token is not read
    count = max(1, min(64, fits)) if given.num_tokens is None else given.num_tokens
    for ids in decode(folder, prompts, count):
        print(",".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids))


def _ids(prompt: str) -> list[int]:
    """Return the ids of a prompt such as "12,5,9"."""
    # `int` would also read 1_000 and digits of other alphabets.
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", prompt, re.ASCII):
        rule = "must be token ids, such as 12,5,9: the folder has no tokenizer.json"
        raise ValueError(f"a prompt is {prompt!r:.80}: {rule}")
    return [int(i) for i in prompt.split(",")]


if __name__ == "__main__":
    try:
        main()
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"decode.py: {' '.join(str(error).split())}")
