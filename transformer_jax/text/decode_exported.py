"""Decoding with the programs of an exported folder, without transformer_jax.

This file is copied into the folder as decode.py. It needs jax, flatbuffers and safetensors:

    python FOLDER/decode.py "Once upon a time" --num-tokens 40   needs tokenizer.json and tokenizers
    python FOLDER/decode.py 12,5,9 7,3 --num-tokens 40           two prompts as token IDs
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
"""Value of "format" in config.json. Folders with any other format are rejected."""


def decode(folder: str | Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Decode up to `count` tokens greedily after each prompt, ending a row at a stop token.

    Raises ValueError if the folder is not an export, if the prompts do not fit, or if a logit is
    NaN.
    """
    folder = Path(folder)
    about = read_about(folder)
    check_ids(about, prompts)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    check_prompts(about, lengths, count)
    width = min(1 << int(lengths.max() - 1).bit_length(), about["context"])  # few compiled shapes
    tokens = np.zeros((len(prompts), width), np.int32)  # the zeros after a prompt are not read
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    prefill, step = load_programs(folder)
    logits, state = prefill(tokens, lengths)
    stop, ended = np.array(about["stop"], np.int32), np.zeros(len(prompts), bool)
    # Continue rows that have ended until all rows have ended. The excess is removed below.
    found = [likeliest(logits, ended)]
    ended = np.isin(found[0], stop)
    while len(found) < count and not ended.all():
        logits, state = step(found[-1].astype(jnp.int32), state)
        found.append(likeliest(logits, ended))
        ended |= np.isin(found[-1], stop)
    rows = np.stack(found, axis=1)
    ends = np.isin(rows, stop)
    lengths = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, rows.shape[1])
    return [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]


def likeliest(logits: jax.Array, ended: np.ndarray) -> jax.Array:  # [B, V], bool[B] -> i32[B]
    """Return the likeliest tokens; raise ValueError if an open row has no finite maximum."""
    # On a CPU, XLA's maximum can miss a NaN in a long row.
    top = np.asarray(jnp.max(jnp.where(jnp.isnan(logits), jnp.inf, logits), axis=-1))
    if len(wrong := np.flatnonzero(~np.isfinite(top) & ~ended)):
        raise ValueError(f"prompt {wrong[0]}: the largest logit of a next token is not finite")
    return jnp.argmax(logits, axis=-1)


def load_programs(folder: Path) -> tuple[Any, Any]:
    """Return the functions prefill(tokens, lengths) and step(tokens, state).

    Both return logits and the state. `step` donates its state, so the next state reuses the memory.
    """
    from jax import export
    from safetensors.flax import load_file

    params: dict[str, jax.Array] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        params |= _read(file, load_file)
    calls = [  # `deserialize` requires a bytearray
        _read(folder / f"{name}.jax", lambda file: export.deserialize(bytearray(file.read_bytes())))
        for name in ("prefill", "step")
    ]
    prefill, step = jax.jit(calls[0].call), jax.jit(calls[1].call, donate_argnums=2)
    return lambda *args: prefill(params, *args), lambda *args: step(params, *args)


def read_about(folder: Path) -> dict[str, Any]:
    """Read config.json; raise ValueError if its format is unknown or a field is missing."""
    file = folder / "config.json"
    about = _read(file, lambda file: json.loads(file.read_text()))
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        found = about.get("format") if isinstance(about, dict) else about
        raise ValueError(f"{file}: format is {found!r:.80}: must be {FORMAT!r}")
    lacking = {"batch", "context", "first", "stop", "vocab_size"} - about.keys()
    if lacking:
        raise ValueError(f"{file} is missing {', '.join(sorted(lacking))}")
    return about


def _read(file: Path, read: Callable[[Path], Any]) -> Any:
    """Read a file, raising a ValueError that names the file if it is damaged."""
    try:
        return read(file)
    except OSError:  # the message already contains the file name
        raise
    except Exception as error:  # the libraries raise many types of errors for damaged files
        raise ValueError(f"{file} cannot be read: {error or type(error).__name__}") from error


def check_prompts(about: dict[str, Any], lengths: np.ndarray, count: int) -> None:
    """Raise ValueError if the prompts and the new tokens do not fit the programs."""
    if not len(lengths) or not lengths.min():
        raise ValueError("a prompt has no tokens: must have at least one")
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"the number of new tokens is {count!r}: must be an integer of at least 1")
    if about["batch"] not in (None, len(lengths)):
        raise ValueError(f"the number of prompts is {len(lengths)}: must be {about['batch']}")
    total, context = int(lengths.max()) + count - 1, about["context"]  # the last token is not read
    if total > context:
        rule = f"the limit is the context, {context}"
        raise ValueError(f"prompt and new tokens reach length {total}: {rule}")


def check_ids(about: dict[str, Any], prompts: Sequence[Sequence[int]]) -> None:
    """Raise ValueError unless the prompts are lists of IDs in the vocabulary."""
    for prompt in prompts:
        if isinstance(prompt, str) or not hasattr(prompt, "__len__"):
            raise ValueError(f"a prompt is {prompt!r:.80}: must be a list of token IDs")
    for token in (token for prompt in prompts for token in prompt):
        if not isinstance(token, int | np.integer) or not 0 <= token < about["vocab_size"]:
            rule = f"must be an ID from 0 to {about['vocab_size'] - 1}"
            raise ValueError(f"a prompt contains the token {token!r}: {rule}")


def main() -> None:
    """Print the continuation of each prompt, or its IDs if there is no tokenizer."""
    folder = Path(__file__).parent
    parser = argparse.ArgumentParser(description="Continue prompts greedily.")
    parser.add_argument(
        "prompts", nargs="+", metavar="PROMPT", help="text, or token IDs such as 12,5,9"
    )
    help_text = "number of new tokens for each prompt (default: 64, or as many as fit)"
    parser.add_argument("--num-tokens", type=int, metavar="N", help=help_text)
    options = parser.parse_args()
    about, file = read_about(folder), folder / "tokenizer.json"
    if file.exists():
        from tokenizers import Tokenizer

        tokenizer = _read(file, lambda file: Tokenizer.from_file(str(file)))
        texts = [tokenizer.encode(text, add_special_tokens=False).ids for text in options.prompts]
        prompts = [about["first"] + text for text in texts]
    else:
        tokenizer, prompts = None, [_ids(prompt) for prompt in options.prompts]
    fits = about["context"] - max(map(len, prompts)) + 1  # the last token is not read
    count = max(1, min(64, fits)) if options.num_tokens is None else options.num_tokens
    for ids in decode(folder, prompts, count):
        print(",".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids))


def _ids(prompt: str) -> list[int]:
    """Return the IDs of a prompt such as "12,5,9"."""
    # `int` also accepts 1_000 and the digits of other alphabets.
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", prompt, re.ASCII):
        rule = "must be token IDs, such as 12,5,9: the folder has no tokenizer.json"
        raise ValueError(f"a prompt is {prompt!r:.80}: {rule}")
    return [int(i) for i in prompt.split(",")]


if __name__ == "__main__":
    try:
        main()
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"decode.py: {' '.join(str(error).split())}")
