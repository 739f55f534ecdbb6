"""LoRA as pure functions over parameters (Hu et al. 2021): W + scale A B, and only A and B learn.

Adapters are a nested dict at the paths of the modules they adapt:

    {"decoder": {"block_0": {"attention": {"query": {"a": f32[D, r], "b": f32[r, N*H]}}}}}

and in a scanned stack {"blocks": ...} with a leading L, so `stack_layers` and `unstack_layers`
serve them too. A kernel counts as the matrix [inputs, outputs] it multiplies with: query [D, N H],
out [N Hv, D].

There is no dropout here: that of LoRA is on each module's input, before A, and a sum of weights
does not see inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from transformer_jax.checks import check_key
from transformer_jax.config import ConfigError, LoraConfig
from transformer_jax.models.stack import stack_layers, unstack_layers

Matrices = dict[str, tuple[int, int]]
"""Paths of modules with a kernel, those of a looped stack, to the kernel's (inputs, outputs)."""


def init_lora(params: Mapping[str, Any], config: LoraConfig, key: jax.Array) -> dict[str, Any]:
    """Draw fresh adapters, which change nothing: in f32, with B = 0.

    A ~ U(-1/sqrt(inputs), 1/sqrt(inputs)).

    That is PEFT's initialisation (He et al. 2015 with a = sqrt 5). A looped and a scanned stack
    draw the same numbers. In a scanned stack, blocks that are no target have A = 0 and B = 0; these
    have no gradient and stay. `params` may be shapes. ConfigError where a target matches nothing.
    """
    check_key("key", key)
    found = matrices(params)
    paths = select(found, config)
    keys = jax.random.split(key, len(paths))
    adapters = {}
    for path, own in zip(paths, keys, strict=True):
        inputs, outputs = found[path]
        bound = inputs**-0.5
        a = jax.random.uniform(own, (inputs, config.rank), jnp.float32, -bound, bound)
        adapters[path] = {"a": a, "b": jnp.zeros((config.rank, outputs), jnp.float32)}
    return nest(adapters, params)


def apply_lora(
    params: Mapping[str, Any], adapters: Mapping[str, Any], config: LoraConfig
) -> dict[str, Any]:
    """Return the parameters of the adapted model: kernel + scale A B where there is an adapter.

    Exact algebra: x (W + s A B) = x W + s (x A) B, for any model and any use of it; differentiable
    in both arguments. A sum is in the wider dtype of the two and rounded by nothing here, so in a
    bf16 model what it adds to a weight counts to 2^-9 of that weight.

    It costs r multiplications for each weight, not each token: as much as r tokens more in a batch,
    which is little in training. The adapted kernels exist twice, and their full gradients once, on
    the way to those of A and B; what training saves is the optimizer's state. To decode, merge
    first: a step of few tokens would spend its time here.
    """

    def walk(params: Mapping[str, Any], adapters: Mapping[str, Any], path: str) -> dict[str, Any]:
        out = dict(params)
        for name, part in adapters.items():
            if not isinstance(params.get(name), Mapping):
                raise ValueError(f"adapters have {path}{name}: the parameters have no such module")
            if part.keys() == {"a", "b"}:
                adapted = _adapted(path + name, params[name], part["a"], part["b"], config)
                out[name] = {**params[name], "kernel": adapted}
            else:
                out[name] = walk(params[name], part, f"{path}{name}/")
        return out

    return walk(params, adapters, "")


def merge_lora(
    params: Mapping[str, Any], adapters: Mapping[str, Any], config: LoraConfig
) -> dict[str, Any]:
    """Apply adapters once and for all: plain parameters, each kernel in the dtype it had.

    In f32 these are the same numbers. In bf16 each sum is rounded: what it adds to a weight is lost
    below 2^-9 of the weight. There is no way back from the sums; keep `params`.
    """
    adapted = apply_lora(params, adapters, config)
    return jax.tree.map(lambda new, old: new.astype(old.dtype), adapted, dict(params))


def lora_loss(loss: Callable[..., Any], config: LoraConfig) -> Callable[..., Any]:
    """Make `loss(params, batch, key)` a function of the adapters: `(adapters, batch, key, params)`.

    The parameters are an argument, which `make_train_step` takes as `frozen=(params,)`: closed
    over, they would be constants of the compiled program.
    """

    def adapted(adapters: Any, batch: Any, key: Any, params: Any) -> Any:
        return loss(apply_lora(params, adapters, config), batch, key)

    return adapted


def matrices(params: Mapping[str, Any]) -> Matrices:
    """Find every module that has a kernel; nothing is computed."""
    shapes = jax.eval_shape(unstack_layers, params)
    return {
        name.removesuffix("/kernel"): _matrix(name.removesuffix("/kernel"), leaf.shape)
        for name, leaf in flatten_dict(shapes, sep="/").items()
        if name.endswith("/kernel")
    }


def select(found: Matrices, config: LoraConfig) -> list[str]:
    """Return the paths that targets and layers mean, sorted; ConfigError if one means none."""
    depth = 1 + max((layer(path) or 0 for path in found), default=0)
    if config.layers is not None and max(config.layers) >= depth:
        rule = f"the stacks have {depth} blocks"
        raise ConfigError(f"layers is {config.layers!r}: {rule}")
    within = {p for p in found if config.layers is None or layer(p) in config.layers}
    if config.targets == "all-linear":
        chosen = {path for path in within if layer(path) is not None}
        if not chosen:
            raise ConfigError("targets is 'all-linear': there is no block with a kernel")
        return sorted(chosen)
    chosen = set()
    for target in config.targets:
        meant = {path for path in within if f"/{path}".endswith(f"/{target}")}
        if not meant:
            there = ", ".join(sorted({"/".join(p.split("/")[-2:]) for p in within})) or "no kernel"
            where = "" if config.layers is None else f" in layers {config.layers!r}"
            raise ConfigError(f"targets has {target!r}: matches nothing{where}; there is {there}")
        chosen |= meant
    return sorted(chosen)


def layer(path: str) -> int | None:
    """Return the index of the block that a path is in; None outside of blocks."""
    for name in path.split("/"):
        if name.startswith("block_"):
            return int(name.removeprefix("block_"))
    return None


def nest(adapters: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Nest adapters by path as `params` are: looped, or stacked and filled with zeros."""
    scanned = "blocks" in _names(params)
    if scanned:
        adapters = {**adapters, **_missing(adapters, matrices(params))}
    tree = unflatten_dict(adapters, sep="/")
    return stack_layers(tree) if scanned else tree


def flatten(adapters: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Undo `nest`: return adapters by the path of their module in a looped stack."""
    found: dict[str, dict[str, Any]] = {}
    for at, leaf in flatten_dict(unstack_layers(adapters), sep="/").items():
        path, _, name = at.rpartition("/")
        found.setdefault(path, {})[name] = leaf
    return found


def _missing(adapters: Mapping[str, Any], found: Matrices) -> dict[str, Any]:
    """Zeros for the blocks that lack what another block of their stack has."""
    has = {_any_block(path): adapter for path, adapter in adapters.items()}
    return {
        path: jax.tree.map(jnp.zeros_like, has[_any_block(path)])
        for path in found
        if _any_block(path) in has and path not in adapters
    }


def _any_block(path: str) -> str:
    return "/".join("blocks" if n.startswith("block_") else n for n in path.split("/"))


def _names(tree: Mapping[str, Any]) -> set[str]:
    found = set(tree)
    for value in tree.values():
        found |= _names(value) if isinstance(value, Mapping) else set()
    return found


def _matrix(path: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return a kernel's inputs and outputs: the first axis and the rest.

    Attention's `out` [N, Hv, D] reads two axes.
    """
    contract = 2 if path.endswith("attention/out") else 1
    return math.prod(shape[:contract]), math.prod(shape[contract:])


def _adapted(
    path: str, module: Mapping[str, Any], a: jax.Array, b: jax.Array, config: LoraConfig
) -> jax.Array:
    if "kernel" not in module:
        raise ValueError(f"adapters have {path}: the parameters have no kernel there")
    kernel = module["kernel"]
    stacked = 1 if "blocks" in path.split("/") else 0
    lead = kernel.shape[:stacked]
    inputs, outputs = _matrix(path, kernel.shape[stacked:])
    wanted = (*lead, inputs, config.rank), (*lead, config.rank, outputs)
    if (np.shape(a), np.shape(b)) != wanted:
        given = f"a {np.shape(a)} and b {np.shape(b)}"
        raise ValueError(f"{path}: {given}: rank {config.rank} wants {wanted[0]} and {wanted[1]}")
    delta = config.scale * jnp.matmul(a, b, precision="highest")
    return kernel + delta.reshape(kernel.shape)
