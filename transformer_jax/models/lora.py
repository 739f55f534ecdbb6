"""LoRA as pure functions over parameters (Hu et al. 2021): W + scale A B, and only A and B learn.

Adapters are a nested dict at the paths of the modules they adapt:

    {"decoder": {"block_0": {"attention": {"query": {"a": f32[D, r], "b": f32[r, N*H]}}}}}

and in a scanned stack {"blocks": ...} with a leading L, so `stack_layers` and `unstack_layers`
serve them too. A kernel counts as the matrix [inputs, outputs] it multiplies with: query [D, N H],
out [N Hv, D].

`with_adapters` puts them beside the kernels of a transformer, which then computes two products;
`apply_lora` adds them to the kernels of any model. Dropout, which is on what A reads, is of the
first alone: a sum of weights does not see inputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.tree_util import KeyPath

from transformer_jax.checks import check_key
from transformer_jax.config import ConfigError, LoraConfig
from transformer_jax.models.adapters import AdaptedKernel
from transformer_jax.models.quantized import QuantizedKernel, quantize
from transformer_jax.models.stack import stack_layers, unstack_layers
from transformer_jax.pytree import Parameter, Params, cast_floats, kernel_axes, path_name

Matrices = dict[str, tuple[int, ...]]
"""Paths of modules with a kernel, those of a looped stack, to the kernel's (inputs, outputs), or
(E, inputs, outputs) of experts."""

Adapter = Mapping[str, jax.Array]
"""The arrays "a" and "b" of one kernel."""
Kernel = jax.Array | QuantizedKernel

Batch = TypeVar("Batch")
Result = TypeVar("Result")


def init_lora(params: Params, config: LoraConfig, key: jax.Array) -> Params:
    """Draw fresh adapters, which change nothing: in f32, with B = 0.

    A ~ U(-1/sqrt(inputs), 1/sqrt(inputs)), PEFT's initialisation (He et al. 2015 with a = sqrt 5).
    A looped and a scanned stack draw the same numbers. In a scanned stack, blocks that are no
    target have A = 0 and B = 0; these have no gradient and stay.

    Args:
        params: of a looped or a scanned stack, or their shapes.
        config: which kernels have adapters, and the rank r.
        key: a single key.

    Returns:
        Dicts like the parameters', with "a" f32[inputs, r] and "b" f32[r, outputs] of each kernel;
        both lead with L in a scanned stack, and with E where they are of experts.

    Raises:
        ConfigError: if a target or a layer names no kernel.
    """
    check_key("key", key)
    found = matrices(params)
    paths = select(found, config)
    keys = jax.random.split(key, len(paths))
    adapters = {}
    for path, own in zip(paths, keys, strict=True):
        *lead, inputs, outputs = found[path]
        bound, shape = inputs**-0.5, (*lead, inputs, config.rank)
        a = jax.random.uniform(own, shape, jnp.float32, -bound, bound)
        adapters[path] = {"a": a, "b": jnp.zeros((*lead, config.rank, outputs), jnp.float32)}
    return nest(adapters, params)


def apply_lora(params: Params, adapters: Params, config: LoraConfig) -> Params:
    """Return the parameters of the adapted model: kernel + scale A B where there is an adapter.

    Exact algebra: x (W + s A B) = x W + s (x A) B, for any model and any use of it; differentiable
    in both arguments. A sum is in the wider dtype of the two and rounded by nothing here, so in a
    bf16 model what it adds to a weight counts to 2^-9 of that weight.

    It costs r multiplications for each weight, not each token: as much as r tokens more in a batch,
    which is little in training. The adapted kernels exist twice, and their full gradients once, on
    the way to those of A and B; what training saves is the optimizer's state. To decode, merge
    first: a step of few tokens would spend its time here.

    Args:
        params: of the model.
        adapters: as `init_lora` makes them.
        config: of the adapters.

    Raises:
        ValueError: if an adapter does not fit, or its kernel is quantised.
    """

    def add(path: str, kernel: Kernel, part: Adapter) -> jax.Array:
        if isinstance(kernel, QuantizedKernel):
            raise ValueError(f"{path}: is quantised: adapters are added to what it was made of")
        _check_adapter(path, kernel, part, config.rank)
        # by default a TPU multiplies float32 in bfloat16
        delta = config.scale * jnp.matmul(part["a"], part["b"], precision="highest")
        return kernel + delta.reshape(kernel.shape)

    return _with_kernels(params, adapters, add)


def with_adapters(
    params: Params,
    adapters: Params | Sequence[Params],
    config: LoraConfig,
    rows: jax.Array | None = None,  # i32[B]
) -> Params:
    """Return the parameters of a transformer with its adapters beside the kernels of its blocks.

    They are taken wherever parameters are: the model computes x W + s (drop(x) A) B, with dropout
    where it gets a key. Nothing is computed here.

    Args:
        params: of the model.
        adapters: as `init_lora` makes them, or several such, all of the same config.
        config: of the adapters.
        rows: i32[B], of several adapters which one each row of a batch uses; -1 is the base alone.

    Raises:
        ValueError: if an adapter does not fit, or is of a kernel outside of the blocks, or `rows`
            is missing or of no use.
    """
    several = not isinstance(adapters, Mapping)
    if several != (rows is not None):
        raise ValueError("rows: must be given for several adapters, and for these alone")
    if isinstance(adapters, Mapping):
        tree: Params = adapters
    else:
        # the adapters of one kernel side by side: [n, ...], and in a scanned stack [L, n, ...]
        def stacked(path: KeyPath, *leaves: jax.Array) -> jax.Array:
            return jnp.stack(leaves, axis=int(_is_scanned(path_name(path))))

        tree = jax.tree_util.tree_map_with_path(stacked, *adapters)

    def beside(path: str, kernel: Kernel, part: Adapter) -> AdaptedKernel:
        own = rows
        if layer(path) is None and not _is_scanned(path):
            raise ValueError(f"adapters have {path}: only kernels of blocks have adapters beside")
        first: Mapping[str, Parameter] = part
        if several:
            at = int(_is_scanned(path))
            shapes = {name: (*part[name].shape[:at], *part[name].shape[at + 1 :]) for name in "ab"}
            first = {name: jax.ShapeDtypeStruct(x, jnp.float32) for name, x in shapes.items()}
        _check_adapter(path, kernel, first, config.rank)
        if several and len(_matrix(path, tuple(kernel.shape))) > 2 + _is_scanned(path):
            raise ValueError(f"adapters have {path}: experts have one adapter each, not several")
        if own is not None:
            own = jnp.asarray(own, jnp.int32)
            if _is_scanned(path):
                own = jnp.broadcast_to(own, (kernel.shape[0], *own.shape))
        return AdaptedKernel(
            base=kernel, a=part["a"], b=part["b"], rows=own, scale=config.scale,
            dropout=config.dropout,
        )  # fmt: skip

    return _with_kernels(params, tree, beside)


def merge_lora(params: Params, adapters: Params, config: LoraConfig) -> Params:
    """Apply adapters once and for all: plain parameters, each kernel in the dtype it had.

    In f32 these are the same numbers. In bf16 each sum is rounded: what it adds to a weight is lost
    below 2^-9 of the weight.

    Args:
        params: of the model.
        adapters: as `init_lora` makes them.
        config: of the adapters.

    Raises:
        ValueError: if an adapter does not fit, its kernel is quantised, or the dtype has no room
            for a sum.
    """
    adapted = apply_lora(params, adapters, config)

    def held(path: KeyPath, new: jax.Array, old: jax.Array) -> jax.Array:
        if new is old:  # it has no adapter
            return old
        found = new.astype(old.dtype)
        if not isinstance(found, jax.core.Tracer):
            lost = jnp.isfinite(old) & ~jnp.isfinite(found)  # in the sum, or in rounding it
            if bool(lost.any()):
                rule = f"{old.dtype} holds at most {float(jnp.finfo(old.dtype).max):.5g}"
                raise ValueError(f"{path_name(path)} has a weight of infinite size: {rule}")
        return found

    return jax.tree_util.tree_map_with_path(held, adapted, dict(params))


def unmerge_lora(params: Params, adapters: Params, config: LoraConfig) -> Params:
    """Take adapters out of merged parameters: kernel - scale A B, in the dtype of the kernel.

    Two sums are rounded, so a weight comes back to within two roundings of its dtype: of bf16, to
    2^-8 of the larger of itself and the merged weight. Parameters from before are exact: keep them.

    Args:
        params: of `merge_lora`.
        adapters: that were merged.
        config: of the adapters.
    """
    negative = dict(adapters)
    taken = jax.tree_util.tree_map_with_path(
        lambda path, leaf: -leaf if path[-1].key == "b" else leaf, negative
    )
    return merge_lora(params, taken, config)


def trained_part(
    params: Params, config: LoraConfig, key: jax.Array, whole: Iterable[str] = ()
) -> Params:
    """Return what fine-tuning with adapters trains: {"lora": adapters, "whole": {name: array}}.

    Of `whole` and `config.trained` each names the beginning of parameters that are trained beside
    the adapters. ConfigError where one names none, or a kernel that has an adapter.
    """
    adapters = init_lora(params, config, key)
    return {"lora": adapters, "whole": _whole(params, adapters, (*config.trained, *whole))}


def frozen_part(params: Params, config: LoraConfig, whole: Iterable[str] = ()) -> Params:
    """Return the parameters that stay as they are, held as `config.base` says."""
    names = tuple(f"{name.strip('/')}/" for name in (*config.trained, *whole))
    flat = flatten_dict(params, sep="/")
    kept = {name: leaf for name, leaf in flat.items() if not f"{name}/".startswith(names)}
    tree = unflatten_dict(kept, sep="/")
    if config.base == "float32":
        return cast_floats(tree, jnp.float32)
    if config.base == "bfloat16":
        return quantize(tree, "bf16")
    found = quantize(tree, config.base)
    return jax.tree.map(
        lambda x: x if isinstance(x, QuantizedKernel) else cast_floats(x, jnp.bfloat16),
        found,
        is_leaf=lambda x: isinstance(x, QuantizedKernel),
    )


def rejoined(frozen: Params, trained: Params, config: LoraConfig) -> Params:
    """Return a model's parameters of both parts, with adapters beside their kernels."""
    return with_adapters(_filled(frozen, trained), trained["lora"], config)


def merged_parts(frozen: Params, trained: Params, config: LoraConfig) -> Params:
    """Return a model's plain parameters of both parts, with adapters added to their kernels."""
    return merge_lora(_filled(frozen, trained), trained["lora"], config)


def _filled(frozen: Params, trained: Params) -> Params:
    flat = {tuple(name.split("/")): leaf for name, leaf in trained["whole"].items()}
    return unflatten_dict(flatten_dict(frozen) | flat)


def _whole(params: Params, adapters: Params, names: tuple[str, ...]) -> Params:
    """Return the parameters whose names begin with one of `names`, by name."""
    flat, found = flatten_dict(params, sep="/"), dict[str, Parameter]()
    adapted = {at.rpartition("/")[0] + "/kernel" for at in flatten_dict(adapters, sep="/")}
    for name in names:
        begun = [at for at in flat if f"{at}/".startswith(f"{name.strip('/')}/")]
        if not begun:
            heads = ", ".join(dict.fromkeys("/".join(at.split("/")[:2]) for at in flat))
            raise ConfigError(
                f"lora.trained has {name!r}: no parameter begins so (there are {heads})"
            )
        if both := sorted(adapted.intersection(begun)):
            raise ConfigError(f"lora.trained has {name!r}: {both[0]} has an adapter")
        found |= {at: flat[at] for at in begun}
    return found


def lora_loss(
    loss: Callable[[Params, Batch, jax.Array | None], Result], config: LoraConfig
) -> Callable[[Params, Batch, jax.Array | None, Params], Result]:
    """Make a loss of parameters a loss of adapters.

    It is of any model; a transformer's train step has the cheaper `with_adapters`. The parameters
    are an argument, which `make_train_step` takes as `frozen=(params,)`: closed over, they would be
    constants of the compiled program.

    Args:
        loss: called with (params, batch, key).
        config: of the adapters.

    Returns:
        A function of (adapters, batch, key, params).
    """

    def adapted(adapters: Params, batch: Batch, key: jax.Array | None, params: Params) -> Result:
        return loss(apply_lora(params, adapters, config), batch, key)

    return adapted


def matrices(params: Params) -> Matrices:
    """Find every module that has a kernel; nothing is computed."""
    if not isinstance(params, Mapping):
        raise ConfigError(f"params is a {type(params).__name__}: must be parameters")
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
            raise ConfigError("lora.targets is 'all-linear': there is no block with a kernel")
        return sorted(chosen)
    chosen = set()
    for target in config.targets:
        meant = {path for path in within if f"/{path}".endswith(f"/{target}")}
        if not meant:
            there = ", ".join(sorted({"/".join(p.split("/")[-2:]) for p in within})) or "no kernel"
            where = "" if config.layers is None else f" in layers {config.layers!r}"
            raise ConfigError(
                f"lora.targets has {target!r}: matches nothing{where}; there is {there}"
            )
        chosen |= meant
    return sorted(chosen)


def layer(path: str) -> int | None:
    """Return the index of the block that a path is in; None outside of blocks."""
    for name in path.split("/"):
        if name.startswith("block_"):
            return int(name.removeprefix("block_"))
    return None


def nest(adapters: Params, params: Params) -> Params:
    """Nest adapters by path as `params` are: looped, or stacked and filled with zeros."""
    if not any("blocks" in path for path in flatten_dict(params)):
        return unflatten_dict(adapters, sep="/")
    # a stack has one array for all blocks: those that lack what another one has get zeros
    any_block = lambda path: re.sub(r"block_\d+", "blocks", path)  # noqa: E731
    has = {any_block(path): adapter for path, adapter in adapters.items()}
    whole = {
        path: adapters.get(path, jax.tree.map(jnp.zeros_like, has[any_block(path)]))
        for path in matrices(params)
        if any_block(path) in has
    }
    return stack_layers(unflatten_dict(whole, sep="/"))


def flatten(adapters: Params) -> dict[str, dict[str, jax.Array]]:
    """Undo `nest`: return adapters by the path of their module in a looped stack."""
    found: dict[str, dict[str, jax.Array]] = {}
    for at, leaf in flatten_dict(unstack_layers(adapters), sep="/").items():
        path, _, name = at.rpartition("/")
        found.setdefault(path, {})[name] = leaf
    return found


def _matrix(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a kernel's inputs and outputs, after what counts its matrices."""
    first, contract = kernel_axes(f"{path}/kernel".split("/"), len(shape))
    inputs = shape[first : first + contract]
    return (*shape[:first], math.prod(inputs), math.prod(shape[first + contract :]))


def _is_scanned(path: str) -> bool:
    return "blocks" in path.split("/")


def _with_kernels(
    params: Params,
    adapters: Params,
    make: Callable[[str, Kernel, Adapter], Parameter],
) -> Params:
    """Return `params` with `make(path, kernel, adapter)` as the kernel of each adapted module."""
    for what, tree in dict(params=params, adapters=adapters).items():
        if not isinstance(tree, Mapping):
            raise ValueError(f"{what} is a {type(tree).__name__}: must be a dict by module")

    def walk(params: Params, adapters: Params, path: str) -> Params:
        out = dict(params)
        for name in adapters:
            part, module = adapters[name], params.get(name)
            if not isinstance(module, Mapping):
                raise ValueError(f"adapters have {path}{name}: the parameters have no such module")
            if part.keys() == {"a", "b"}:
                if "kernel" not in module:
                    rule = "the parameters have no kernel there"
                    raise ValueError(f"adapters have {path}{name}: {rule}")
                kernel: Any = module["kernel"]
                pair: Any = part  # of arrays, as the kernel is one or stands for it
                out[name] = {**module, "kernel": make(path + name, kernel, pair)}
            else:
                out[name] = walk(module, part, f"{path}{name}/")
        return out

    return walk(params, adapters, "")


def _check_adapter(path: str, kernel: Parameter, part: Mapping[str, Parameter], rank: int) -> None:
    """Raise ValueError where the shapes of A and B are not those that a kernel wants."""
    *lead, inputs, outputs = _matrix(path, tuple(kernel.shape))
    wanted = (*lead, inputs, rank), (*lead, rank, outputs)
    if (np.shape(part["a"]), np.shape(part["b"])) != wanted:
        given = f"a {np.shape(part['a'])} and b {np.shape(part['b'])}"
        raise ValueError(f"{path}: {given}: rank {rank} wants {wanted[0]} and {wanted[1]}")
