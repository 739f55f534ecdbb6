"""Export a decoder as programs of `jax.export` that run where this package is not installed.

A folder has the weights once, a program that reads prompts, a program of one step, config.json that
describes them, and decode.py (`decode_exported`), which needs none of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from transformer_jax.checks import check_count
from transformer_jax.config import ConfigError
from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.config.keywords import known_keywords
from transformer_jax.decoding.completion import longest_text
from transformer_jax.decoding.generation import prefill
from transformer_jax.decoding.step import make_step
from transformer_jax.models.factory import build, init_decode_state
from transformer_jax.pretrained.safetensors_folder import write_folder
from transformer_jax.pytree import Params, PyTree
from transformer_jax.text import decode_exported
from transformer_jax.untrusted_files import check_path

PLATFORMS = "cpu", "cuda", "rocm", "tpu"
"""The platforms that a program can be lowered for, by the names that JAX has for them."""

CONTEXT = 2048
"""The context, where none is given and the model reads as many tokens."""

Named = dict[str, jax.Array]
"""The leaves of a tree by their paths: "layers/0/k"."""


@known_keywords
def export_decoder(
    path: str | Path,
    config: AnyModelConfig,
    params: Params,
    *,
    context: int | None = None,
    batch: int | None = None,
    platforms: Sequence[str] = ("cpu", "cuda", "tpu"),
    first: Sequence[int] = (),
    stop: Sequence[int] = (),
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Write a folder with which jax alone decodes, whole or not at all.

    `prefill.jax` reads prompts: (params, tokens i32[B, T], lengths i32[B]) -> (logits f32[B, V],
    state). `step.jax` reads a token a row: (params, tokens i32[B], state) -> (logits, state). T is
    open, up to the context. Params and state are dicts of arrays; `model.safetensors` holds the
    params. Attention is computed by plain JAX ("xla"), which all platforms run.

    Args:
        path: the folder; new, or of an earlier export, which is replaced.
        config: of a model that goes on with a text.
        params: its parameters, in the dtypes in which they are written.
        context: most tokens of a prompt and its answer but the last, which is never read; None is
            the model's, at most 2048.
        batch: B, rows; None leaves it open: the same file decodes any number of rows.
        platforms: where the programs run, of "cpu", "cuda", "rocm" and "tpu".
        first: ids that decode.py puts before a text.
        stop: ids after which decode.py ends a row.
        files: more files, content by name: `tokenizer.json` lets decode.py read texts.

    Raises:
        CheckpointError: if the folder holds any other file, or a parameter cannot be written.
        ConfigError: if the model does not go on with a text, or an argument is not what it must be.
        ImportError: if flatbuffers is not installed, by which `jax.export` serialises.
    """
    check_path("path", path)
    check_is_decoder(config)
    context = check_context(config, context)
    if batch is not None:
        check_count("batch", batch, 1)
    listed = list(platforms) if isinstance(platforms, Sequence | Set) else []
    if not listed or isinstance(platforms, str) or any(name not in PLATFORMS for name in listed):
        raise ConfigError(
            f"platforms is {platforms!r}: must be one or more of {', '.join(PLATFORMS)}"
        )
    for name, ids in (("first", first), ("stop", stop)):
        if isinstance(ids, str) or not isinstance(ids, Sequence):
            raise ConfigError(f"{name} is {ids!r}: must be a list of token ids")
        for place, token in enumerate(ids):
            check_count(f"{name}[{place}]", token, 0, config.vocab_size - 1)
    programs, state = decoding_programs(config, params, context)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), named(params))
    sizes = {  # in a scope each: a program may only name sizes that its own arguments have
        "prefill": export.symbolic_shape("b, t", constraints=[f"t <= {context}"]),
        "step": export.symbolic_shape("b"),
    }
    written = {}
    for name, program in programs.items():
        rows, *length = sizes[name]
        shown = arguments(rows if batch is None else batch, *length, state=state)
        exported = export.export(jax.jit(program), platforms=listed)(shapes, *shown)
        written[f"{name}.jax"] = bytes(exported.serialize())
    about = describe(config, context, batch, state, first, stop)
    about |= {"jax": version("jax"), "platforms": listed}
    # A module of this package that imports nothing of it: tested here, copied there.
    script = Path(decode_exported.__file__).read_bytes()
    tensors = ((name, np.asarray(leaf)) for name, leaf in named(params).items())
    write_folder(path, about, tensors, files={**(files or {}), **written, "decode.py": script})


def decoding_programs(
    config: AnyModelConfig, params: Params, context: int
) -> tuple[dict[str, Callable[..., tuple[jax.Array, Named]]], Named]:
    """Return prefill and step as functions of dicts of arrays, and the shapes of a row's state."""
    if hasattr(config, "implementation"):
        # A kernel of this package is code of this machine; XLA's own operations run anywhere.
        config = replace(config, implementation="xla")
    # The script has no classes of this package: trees go in and out as flat dicts.
    structure, names = jax.tree.structure(params), [*named(params)]
    model: Any = build(config)  # one that writes: `make_step` refuses the others
    step: Any = make_step(model)

    def empty(rows: int) -> PyTree:
        return init_decode_state(config, None, rows, context)

    row = jax.eval_shape(lambda: empty(1))
    state_structure, state_names = jax.tree.structure(row), [*named(row)]

    def whole(params: Named) -> Params:
        return jax.tree.unflatten(structure, [params[name] for name in names])

    def read(params: Named, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Named]:
        logits, state = prefill(step, whole(params), tokens, empty(tokens.shape[0]), lengths)
        return logits, named(state)

    def advance(params: Named, tokens: jax.Array, state: Named) -> tuple[jax.Array, Named]:
        # A dict is flattened in the order of its keys, which is not the state's.
        held = jax.tree.unflatten(state_structure, [state[name] for name in state_names])
        logits, held = step(whole(params), tokens[:, None], held)
        return logits[:, 0].astype(jnp.float32), named(held)

    return {"prefill": read, "step": advance}, named(row)


def named(tree: PyTree) -> Named:
    """Return the leaves of a tree by their paths, in order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def arguments(rows: Any, length: Any = None, *, state: Named) -> tuple[Any, ...]:
    """Return the shapes of what is given beside params: of a prefill with a length, or a step."""
    per_row = jax.ShapeDtypeStruct((rows,), jnp.int32)
    if length is not None:
        return jax.ShapeDtypeStruct((rows, length), jnp.int32), per_row
    of_rows = {n: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for n, x in state.items()}
    return per_row, of_rows


def describe(
    config: AnyModelConfig,
    context: int,
    batch: int | None,
    state: Named,
    first: Sequence[int],
    stop: Sequence[int],
) -> dict[str, Any]:
    """Return what config.json says of every export; an open size is null."""
    return {
        "format": decode_exported.FORMAT,
        "batch": batch,
        "context": context,
        "first": [int(i) for i in first],
        "state": {
            name: {"shape": [batch, *x.shape[1:]], "dtype": x.dtype.name}
            for name, x in state.items()
        },
        "stop": [int(i) for i in stop],
        "vocab_size": config.vocab_size,
    }


def check_is_decoder(config: AnyModelConfig) -> None:
    """Raise ConfigError unless the model goes on with a text."""
    rule = "must be a model that goes on with a text, and reads no source"
    if config.kind == "encoder-decoder" and not config.supports("shared_table"):
        raise ConfigError(f"source_vocab_size is {config.source_vocab_size}: {rule}")
    if config.kind != "decoder" and config.supports("cache"):
        raise ConfigError(f"kind is {config.kind!r}: {rule}")


def check_context(config: AnyModelConfig, context: int | None) -> int:
    """Return the context, or what it is where none is given; ValueError if it is too long."""
    longest = longest_text(config)
    if context is None:
        return min(longest, CONTEXT)
    check_count("context", context, 1)
    if context > longest:
        raise ConfigError(f"context is {context}: must be at most max_len {longest}")
    return context
