"""LoRA as pure functions of parameters (Hu et al. 2021): W + scale A B, with trainable A and B.

Adapters are stored in a nested dict with the paths of the adapted modules:

    {"decoder": {"block_0": {"attention": {"query": {"a": f32[D, r], "b": f32[r, N*H]}}}}}

In a scanned stack, the adapters are {"blocks": ...} with a leading axis L. `stack_layers` and
`unstack_layers` also convert adapters. Kernels are treated as matrices: query [D, N H], out [N Hv,
D].

`with_adapters` stores adapters next to the kernels of a transformer, which then computes two
products and supports dropout on the input of A. `apply_lora` adds adapters to the kernels of any
model.
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
"""Kernel shapes, keyed by the path of the module in a looped stack: (inputs, outputs), or
(E, inputs, outputs) for experts."""

Adapter = Mapping[str, jax.Array]
"""Arrays "a" and "b" for one kernel."""
Kernel = jax.Array | QuantizedKernel

Batch = TypeVar("Batch")
Result = TypeVar("Result")


def init_lora(params: Params, config: LoraConfig, key: jax.Array) -> Params:
    """Initialize f32 adapters with B = 0, which do not change the model before training.

    A ~ U(-1/sqrt(inputs), 1/sqrt(inputs)), as in PEFT (He et al. 2015 with a = sqrt 5). Looped and
    scanned stacks draw the same numbers. In a scanned stack, blocks that are not targeted have A =
    B = 0. Their gradients are zero, so they remain zero.

    Args:
        params: parameters of a looped or scanned stack, or their shapes.
        config: config of the adapters, with the targeted kernels and the rank r.
        key: a single PRNG key.

    Returns:
        A nested dict with the structure of the parameters, and with "a" f32[inputs, r] and "b"
        f32[r, outputs] for each kernel. Both arrays have a leading axis L in a scanned stack, and a
        leading axis E for experts.

    Raises:
        ConfigError: If a target or a layer matches no kernel.
    """
    check_key("key", key)
    found = matrices(params)
    paths = select(found, config)
    # The paths are those of a looped stack, so looped and scanned models draw the same adapters.
    keys = jax.random.split(key, len(paths))
    adapters = {}
    for path, a_key in zip(paths, keys, strict=True):
        *lead, inputs, outputs = found[path]
        # This is the distribution of PEFT, Kaiming's uniform distribution with a = sqrt(5). B is
        # zero, so the adapted model starts as the base model.
        bound, shape = inputs**-0.5, (*lead, inputs, config.rank)
        a = jax.random.uniform(a_key, shape, jnp.float32, -bound, bound)
        adapters[path] = {"a": a, "b": jnp.zeros((*lead, config.rank, outputs), jnp.float32)}
    return nest(adapters, params)


def apply_lora(params: Params, adapters: Params, config: LoraConfig) -> Params:
    """Return the parameters of the adapted model: kernel + scale A B for each adapter.

    This function works for any model and is differentiable with respect to both arguments. The sum
    has the wider of the two dtypes. If the model then rounds the weight to bf16, changes smaller
    than 2^-9 times the weight are lost.

    The cost is r multiplications per weight, the same as for r more tokens in a batch. This is
    negligible in training, but would dominate each decoding step, so merge the adapters before you
    decode. Memory contains two copies of the adapted kernels and one copy of their full gradients,
    so training saves only optimizer state.

    Args:
        params: parameters of the model.
        adapters: adapters from `init_lora`.
        config: config of the adapters.

    Raises:
        ValueError: If an adapter does not match its kernel, or if the kernel is quantized.
    """

    def add(path: str, kernel: Kernel, part: Adapter) -> jax.Array:
        if isinstance(kernel, QuantizedKernel):
            raise ValueError(f"{path} is quantised: add adapters to the original kernel instead")
        _check_adapter(path, kernel, part, config.rank)
        # by default, TPUs multiply float32 arrays in bfloat16
        delta = config.scale * jnp.matmul(part["a"], part["b"], precision="highest")
        return kernel + delta.reshape(kernel.shape)

    return _with_kernels(params, adapters, add)


def with_adapters(
    params: Params,
    adapters: Params | Sequence[Params],
    config: LoraConfig,
    rows: jax.Array | None = None,  # i32[B]
) -> Params:
    """Return a transformer's parameters with adapters next to the kernels of its blocks.

    Use the result like any other parameters. The model computes x W + s (drop(x) A) B, with dropout
    if you pass a key. This function itself does no arithmetic.

    Args:
        params: parameters of the model.
        adapters: adapters from `init_lora`, or a sequence of several adapters with the same config.
        config: config of the adapters.
        rows: i32[B], the adapter to use for each row; -1 means the base model. Required only with
            several adapters.

    Raises:
        ValueError: If an adapter does not match its kernel, if the kernel is outside the blocks, if
            `rows` is missing, or if `rows` is passed with a single adapter.
    """
    several = not isinstance(adapters, Mapping)
    if several != (rows is not None):
        raise ValueError("rows must be passed with several adapters, and only with these")
    if isinstance(adapters, Mapping):
        tree: Params = adapters
    else:
        # stack the adapters of each kernel as [n, ...], or as [L, n, ...] in a scanned stack
        def stacked(path: KeyPath, *leaves: jax.Array) -> jax.Array:
            return jnp.stack(leaves, axis=int(_is_scanned(path_name(path))))

        tree = jax.tree_util.tree_map_with_path(stacked, *adapters)

    def attach(path: str, kernel: Kernel, part: Adapter) -> AdaptedKernel:
        kernel_rows, scanned = rows, _is_scanned(path)
        if layer(path) is None and not scanned:
            raise ValueError(f"adapters contain {path}: only kernels of blocks can have adapters")
        first: Mapping[str, Parameter] = part
        if several:
            at = int(scanned)
            shapes = {name: (*part[name].shape[:at], *part[name].shape[at + 1 :]) for name in "ab"}
            first = {name: jax.ShapeDtypeStruct(x, jnp.float32) for name, x in shapes.items()}
        _check_adapter(path, kernel, first, config.rank)
        if several and len(_matrix(path, tuple(kernel.shape))) > 2 + scanned:
            raise ValueError(f"adapters contain {path}: an expert can only have a single adapter")
        if kernel_rows is not None:
            kernel_rows = jnp.asarray(kernel_rows, jnp.int32)
            if scanned:
                # The scan over layers slices every array in the parameters along its first axis.
                kernel_rows = jnp.broadcast_to(kernel_rows, (kernel.shape[0], *kernel_rows.shape))
        return AdaptedKernel(
            base=kernel, a=part["a"], b=part["b"], rows=kernel_rows, scale=config.scale,
            dropout=config.dropout,
        )  # fmt: skip

    return _with_kernels(params, tree, attach)


def merge_lora(params: Params, adapters: Params, config: LoraConfig) -> Params:
    """Merge adapters into plain parameters, without changing the dtype of a kernel.

    In f32, the result is exact except for rounding. In bf16, changes below 2^-9 of a weight are
    lost.

    Args:
        params: parameters of the model.
        adapters: adapters from `init_lora`.
        config: config of the adapters.

    Raises:
        ValueError: If an adapter does not match its kernel, if the kernel is quantized, or if a sum
            overflows.
    """
    adapted = apply_lora(params, adapters, config)

    def restore_dtype(path: KeyPath, new: jax.Array, old: jax.Array) -> jax.Array:
        if new is old:  # this kernel has no adapter
            return old
        merged = new.astype(old.dtype)
        if not isinstance(merged, jax.core.Tracer):
            overflow = jnp.isfinite(old) & ~jnp.isfinite(merged)  # in the sum or its rounding
            if bool(overflow.any()):
                rule = f"the maximum of {old.dtype} is {float(jnp.finfo(old.dtype).max):.5g}"
                raise ValueError(f"{path_name(path)} has an infinite weight: {rule}")
        return merged

    return jax.tree_util.tree_map_with_path(restore_dtype, adapted, dict(params))


def unmerge_lora(params: Params, adapters: Params, config: LoraConfig) -> Params:
    """Subtract merged adapters: kernel - scale A B, in the dtype of the kernel.

    Merging and unmerging each involve one rounding step. In bf16, a weight can therefore change by
    2^-8 of the original or merged weight, whichever is larger. If you need the exact weights, keep
    the original parameters.

    Args:
        params: parameters from `merge_lora`.
        adapters: the adapters that were merged.
        config: config of the adapters.
    """
    # If both A and B changed sign, their product would not.
    negated = jax.tree_util.tree_map_with_path(
        lambda path, leaf: -leaf if path[-1].key == "b" else leaf, dict(adapters)
    )
    return merge_lora(params, negated, config)


def split_trained(
    params: Params, config: LoraConfig, key: jax.Array, whole: Iterable[str] = ()
) -> Params:
    """Return the trainable parameters: {"lora": adapters, "whole": {name: array}}.

    `whole` and `config.trained` contain name prefixes of parameters that are trained in addition to
    the adapters. Each prefix must match a parameter, and no prefix may match an adapted kernel.
    """
    adapters = init_lora(params, config, key)
    flat, found = flatten_dict(params, sep="/"), dict[str, Parameter]()
    adapted = {at.rpartition("/")[0] + "/kernel" for at in flatten_dict(adapters, sep="/")}
    for prefix in (*config.trained, *whole):
        names = [name for name in flat if f"{name}/".startswith(f"{prefix.strip('/')}/")]
        if not names:
            heads = ", ".join(dict.fromkeys("/".join(name.split("/")[:2]) for name in flat))
            rule = f"no parameter has this prefix (there are {heads})"
            raise ConfigError(f"lora.trained contains {prefix!r}: {rule}")
        if both := sorted(adapted.intersection(names)):
            raise ConfigError(f"lora.trained contains {prefix!r}: {both[0]} has an adapter")
        found |= {name: flat[name] for name in names}
    return {"lora": adapters, "whole": found}


def split_frozen(params: Params, config: LoraConfig, whole: Iterable[str] = ()) -> Params:
    """Return the frozen parameters in the format that `config.base` specifies."""
    prefixes = tuple(f"{prefix.strip('/')}/" for prefix in (*config.trained, *whole))
    flat = flatten_dict(params, sep="/")
    kept = {name: leaf for name, leaf in flat.items() if not f"{name}/".startswith(prefixes)}
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


def join_parts(frozen: Params, trained: Params, config: LoraConfig) -> Params:
    """Combine frozen and trained parameters, with adapters stored next to their kernels."""
    return with_adapters(_filled(frozen, trained), trained["lora"], config)


def merge_parts(frozen: Params, trained: Params, config: LoraConfig) -> Params:
    """Combine frozen and trained parameters, with adapters merged into their kernels."""
    return merge_lora(_filled(frozen, trained), trained["lora"], config)


def _filled(frozen: Params, trained: Params) -> Params:
    flat = {tuple(name.split("/")): leaf for name, leaf in trained["whole"].items()}
    return unflatten_dict(flatten_dict(frozen) | flat)


def lora_loss(
    loss: Callable[[Params, Batch, jax.Array | None], Result], config: LoraConfig
) -> Callable[[Params, Batch, jax.Array | None, Params], Result]:
    """Convert a loss function of parameters to a loss function of adapters.

    This function works for any model. For a transformer, training with `with_adapters` is cheaper.
    Pass the parameters with `make_train_step(..., frozen=(params,))`. In a closure, they would
    become constants of the compiled program.

    Args:
        loss: a function of (params, batch, key).
        config: config of the adapters.

    Returns:
        A function of (adapters, batch, key, params).
    """

    def adapted(adapters: Params, batch: Batch, key: jax.Array | None, params: Params) -> Result:
        return loss(apply_lora(params, adapters, config), batch, key)

    return adapted


def matrices(params: Params) -> Matrices:
    """Return the shapes of all kernels, keyed by module path, without any computation."""
    if not isinstance(params, Mapping):
        raise ConfigError(f"params is of type {type(params).__name__}: must be parameters")
    shapes = jax.eval_shape(unstack_layers, params)
    return {
        name.removesuffix("/kernel"): _matrix(name.removesuffix("/kernel"), leaf.shape)
        for name, leaf in flatten_dict(shapes, sep="/").items()
        if name.endswith("/kernel")
    }


def select(found: Matrices, config: LoraConfig) -> list[str]:
    """Return the sorted paths that match; raise ConfigError if a target or layer matches none."""
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
        # The slash restricts matches to whole names, so "out" does not select a module like
        # "layout".
        meant = {path for path in within if f"/{path}".endswith(f"/{target}")}
        if not meant:
            known = ", ".join(sorted({"/".join(p.split("/")[-2:]) for p in within})) or "no kernel"
            where = "" if config.layers is None else f" in layers {config.layers!r}"
            raise ConfigError(
                f"lora.targets contains {target!r}, which matches nothing{where}; there is {known}"
            )
        chosen |= meant
    return sorted(chosen)


def layer(path: str) -> int | None:
    """Return the index of the block that contains a path, or None outside the blocks."""
    for name in path.split("/"):
        if name.startswith("block_"):
            return int(name.removeprefix("block_"))
    return None


def nest(adapters: Params, params: Params) -> Params:
    """Nest adapters like `params`. In a scanned stack, missing blocks are filled with zeros."""
    if not any("blocks" in path for path in flatten_dict(params)):
        return unflatten_dict(adapters, sep="/")
    # a scanned stack has one array for all blocks, so blocks without an adapter contain zeros
    any_block = lambda path: re.sub(r"block_\d+", "blocks", path)  # noqa: E731
    adapted = {any_block(path): adapter for path, adapter in adapters.items()}
    filled = {
        path: adapters.get(path, jax.tree.map(jnp.zeros_like, adapted[any_block(path)]))
        for path in matrices(params)
        if any_block(path) in adapted
    }
    return stack_layers(unflatten_dict(filled, sep="/"))


def flatten(adapters: Params) -> dict[str, dict[str, jax.Array]]:
    """Undo `nest` and return adapters keyed by the path of their module in a looped stack."""
    found: dict[str, dict[str, jax.Array]] = {}
    for at, leaf in flatten_dict(unstack_layers(adapters), sep="/").items():
        path, _, name = at.rpartition("/")
        found.setdefault(path, {})[name] = leaf
    return found


def _matrix(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a kernel that is reshaped to matrices: (..., inputs, outputs)."""
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
    """Replace the kernel of each adapted module with `make(path, kernel, adapter)`."""
    for argument, tree in dict(params=params, adapters=adapters).items():
        if not isinstance(tree, Mapping):
            raise ValueError(
                f"{argument} is of type {type(tree).__name__}: must be a dict keyed by module"
            )

    def walk(params: Params, adapters: Params, path: str) -> Params:
        out = dict(params)
        for name in adapters:
            part, module = adapters[name], params.get(name)
            if not isinstance(module, Mapping):
                raise ValueError(
                    f"adapters contain {path}{name}: the parameters have no such module"
                )
            if part.keys() == {"a", "b"}:
                if "kernel" not in module:
                    rule = "the parameters have no kernel there"
                    raise ValueError(f"adapters contain {path}{name}: {rule}")
                kernel: Any = module["kernel"]
                pair: Any = part
                out[name] = {**module, "kernel": make(path + name, kernel, pair)}
            else:
                out[name] = walk(module, part, f"{path}{name}/")
        return out

    return walk(params, adapters, "")


def _check_adapter(path: str, kernel: Parameter, part: Mapping[str, Parameter], rank: int) -> None:
    """Raise ValueError if the shapes of A and B do not match the kernel."""
    *lead, inputs, outputs = _matrix(path, tuple(kernel.shape))
    a, b = (*lead, inputs, rank), (*lead, rank, outputs)
    if (np.shape(part["a"]), np.shape(part["b"])) != (a, b):
        shapes = f"a {np.shape(part['a'])} and b {np.shape(part['b'])}"
        raise ValueError(f"{path} has {shapes}: rank {rank} requires {a} and {b}")
