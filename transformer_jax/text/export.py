"""Export of decoders as `jax.export` programs that run without this package.

A folder contains one copy of the weights, a program that reads prompts, a program for one step, a
config.json that describes them, and decode.py (`decode_exported`), which decodes with them.
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
from transformer_jax.decoding.completion import max_text_tokens
from transformer_jax.decoding.generation import prefill
from transformer_jax.decoding.step import make_step
from transformer_jax.models.factory import build, init_decode_state
from transformer_jax.pretrained.safetensors_folder import write_folder
from transformer_jax.pytree import Params, PyTree
from transformer_jax.text import decode_exported
from transformer_jax.untrusted_files import check_path

PLATFORMS = "cpu", "cuda", "rocm", "tpu"
"""JAX's names for the platforms that a program can be exported to."""

CONTEXT = 2048
"""Default context length, unless the model's limit is smaller."""

Named = dict[str, jax.Array]
"""Leaves of a tree, keyed by paths such as "layers/0/k"."""


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
    """Write a folder that can be decoded with JAX alone.

    `prefill.jax` reads prompts: (params, tokens i32[B, T], lengths i32[B]) -> (logits f32[B, V],
    state). `step.jax` reads one token per row: (params, tokens i32[B], state) -> (logits, state). T
    is symbolic, and its maximum is the context. The parameters and the state are dicts of arrays,
    and `model.safetensors` contains the parameters. Attention uses plain JAX ("xla"), which runs on
    every platform. If an error occurs, nothing is written.

    Args:
        path: a new folder, or the folder of an earlier export, which is replaced.
        config: the config of a model that continues text.
        params: the parameters, in the dtypes to write.
        context: maximum number of tokens in a prompt and its answer, not counting the last token,
            which is never read. None means the model's limit or 2048, whichever is smaller.
        batch: B, the number of rows; None leaves B symbolic, so that one file serves any batch
            size.
        platforms: one or more of "cpu", "cuda", "rocm" and "tpu".
        first: token IDs that decode.py puts before the text.
        stop: token IDs that end a row in decode.py.
        files: contents of additional files, keyed by file name. If they include `tokenizer.json`,
            decode.py accepts text.

    Raises:
        CheckpointError: if the folder contains other files, or a parameter cannot be written.
        ConfigError: if the model does not continue text, or an argument is invalid.
        ImportError: if flatbuffers, which `jax.export` needs, is not installed.
    """
    check_path("path", path)
    check_is_decoder(config)
    context = check_context(config, context)
    if batch is not None:
        check_count("batch", batch, 1)
    listed = list(platforms) if isinstance(platforms, Sequence | Set) else []
    if not listed or isinstance(platforms, str) or any(name not in PLATFORMS for name in listed):
        rule = f"must be one or more of {', '.join(PLATFORMS)}"
        raise ConfigError(f"platforms is {platforms!r}: {rule}")
    for name, ids in (("first", first), ("stop", stop)):
        if isinstance(ids, str) or not isinstance(ids, Sequence):
            raise ConfigError(f"{name} is {ids!r}: must be a list of token IDs")
        for place, token in enumerate(ids):
            check_count(f"{name}[{place}]", token, 0, config.vocab_size - 1)
    programs, state = decoding_programs(config, params, context)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), named(params))
    sizes = {  # one scope each, because a program knows only the sizes of its own arguments
        "prefill": export.symbolic_shape("b, t", constraints=[f"t <= {context}"]),
        "step": export.symbolic_shape("b"),
    }
    written = {}
    for name, program in programs.items():
        rows, *length = sizes[name]
        rows = rows if batch is None else batch
        args: tuple[Any, ...] = (jax.ShapeDtypeStruct((rows,), jnp.int32),)  # lengths, or tokens
        if name == "prefill":
            args = jax.ShapeDtypeStruct((rows, *length), jnp.int32), *args
        else:
            leaves = state.items()
            args += ({n: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for n, x in leaves},)
        exported = export.export(jax.jit(program), platforms=listed)(shapes, *args)
        written[f"{name}.jax"] = bytes(exported.serialize())
    about = {
        "format": decode_exported.FORMAT,
        "batch": batch,  # a symbolic size is null
        "context": context,
        "first": [int(i) for i in first],
        "state": {
            name: {"shape": [batch, *x.shape[1:]], "dtype": x.dtype.name}
            for name, x in state.items()
        },
        "stop": [int(i) for i in stop],
        "vocab_size": config.vocab_size,
        "jax": version("jax"),
        "platforms": listed,
    }
    # The script imports nothing from this package, so it can be copied into the folder.
    script = Path(decode_exported.__file__).read_bytes()
    tensors = ((name, np.asarray(leaf)) for name, leaf in named(params).items())
    write_folder(path, about, tensors, files={**(files or {}), **written, "decode.py": script})


def decoding_programs(
    config: AnyModelConfig, params: Params, context: int
) -> tuple[dict[str, Callable[..., tuple[jax.Array, Named]]], Named]:
    """Return prefill and step as functions of dicts of arrays, and the state of one row."""
    if getattr(config, "invariant", False):
        rule = "an exported program cannot promise equal bits: use a config with invariant=False"
        raise ConfigError(f"invariant is True: {rule}")
    if hasattr(config, "implementation"):
        # This package's kernels contain code for this machine, but XLA's operations run anywhere.
        config = replace(config, implementation="xla")
    # The script cannot import the classes of this package, so trees are passed as flat dicts.
    structure, names = jax.tree.structure(params), [*named(params)]
    model: Any = build(config)  # `make_step` rejects a model that does not generate tokens
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
        # JAX flattens a dict in sorted key order, which differs from the order of the state.
        tree = jax.tree.unflatten(state_structure, [state[name] for name in state_names])
        logits, tree = step(whole(params), tokens[:, None], tree)
        return logits[:, 0].astype(jnp.float32), named(tree)

    return {"prefill": read, "step": advance}, named(row)


def named(tree: PyTree) -> Named:
    """Return the leaves of a tree, in order, keyed by path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def check_is_decoder(config: AnyModelConfig) -> None:
    """Raise ConfigError unless the model continues text."""
    rule = "must be a model that continues text and reads no source"
    if config.kind == "encoder-decoder" and not config.supports("shared_table"):
        raise ConfigError(f"source_vocab_size is {config.source_vocab_size}: {rule}")
    if config.kind != "decoder" and config.supports("cache"):
        raise ConfigError(f"kind is {config.kind!r}: {rule}")


def check_context(config: AnyModelConfig, context: int | None) -> int:
    """Return the context length or, for None, its default; raise ConfigError if it is too long."""
    longest = max_text_tokens(config)
    if context is None:
        return min(longest, CONTEXT)
    check_count("context", context, 1)
    if context > longest:
        raise ConfigError(f"context is {context}: must be at most max_len, {longest}")
    return context
