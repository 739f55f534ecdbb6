"""Loading and saving of LoRA adapters in the format of Hugging Face's PEFT.

    adapter_config.json         rank, alpha, and the modules that have an adapter
    adapter_model.safetensors   base_model.model.<module>.lora_A.weight [r, inputs]
                                base_model.model.<module>.lora_B.weight [outputs, r]

`names` maps each Hugging Face weight to the paths of the kernels that it contains, in a looped
stack:

    {"model.layers.3.self_attn.q_proj.weight": ("decoder/block_3/attention/query/kernel",)}

If a weight contains several kernels, they are listed in the order of its outputs. For example,
`c_attn` in GPT-2 contains query, key and value. `InterleavedKernels` marks outputs that are
interleaved by head (GPT-NeoX). Entries that are not kernels (biases, norms) are skipped.

Each key in adapter_config.json must be supported, irrelevant to inference, or empty. Shapes are
compared with the parameters before any tensor is read. Requires the package `safetensors`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from transformer_jax.checkpoints.checkpoint import CheckpointError
from transformer_jax.config import LoraConfig
from transformer_jax.config.keywords import known_keywords
from transformer_jax.durable_files import write_file
from transformer_jax.models.lora import Matrices, flatten, layer, matrices, nest, select
from transformer_jax.pretrained.safetensors_folder import ADAPTER
from transformer_jax.pytree import Params
from transformer_jax.untrusted_files import JsonObject, Untrusted, check_path

Names = Mapping[str, Sequence[str]]
"""Paths of the kernels in each Hugging Face weight, in the order of the weight's outputs."""


class InterleavedKernels(tuple[str, ...]):
    """Paths of the kernels in a weight whose outputs are interleaved.

    The outputs form `runs` runs, each with a part of every kernel.
    """

    runs: int
    renamed_by: str

    def __new__(
        cls, names: Iterable[str], runs: int = 1, renamed_by: str = ""
    ) -> InterleavedKernels:
        """Store the paths in the order of a run, and the number of runs.

        `renamed_by` is the name of a family whose module names in transformers differ from its
        tensor names.
        """
        made = super().__new__(cls, names)
        made.runs, made.renamed_by = runs, renamed_by
        return made

    def rows(self, widths: Sequence[int]) -> np.ndarray:
        """Return the row of the concatenated kernels for each row of the weight."""
        ends = np.cumsum(widths)
        parts = [np.arange(end - width, end) for width, end in zip(widths, ends, strict=True)]
        return np.concatenate([x.reshape(self.runs, -1) for x in parts], axis=1).reshape(-1)


Pair = tuple[np.ndarray, np.ndarray]
"""Matrices A f32[r, inputs] and B f32[outputs, r] of a module, in the layout of PEFT."""

CONFIG, TENSORS = ADAPTER, "adapter_model.safetensors"
CONFIG_LIMIT = 2**20
"""Maximum size of adapter_config.json, in bytes."""

_FILES = Untrusted(CheckpointError)

_READ_KEYS = {
    "peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules",
    "layers_to_transform", "bias", "fan_in_fan_out", "init_lora_weights",
}  # fmt: skip
_IGNORED_KEYS = {
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "inference_mode",
    "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "task_type",
}  # fmt: skip
_KEEPS_THE_BASE = (True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that do not change the base weights; pissa, olora and loftq do."""


@known_keywords
def save_lora(
    path: str | os.PathLike[str],
    params: Params,
    adapters: Params,
    config: LoraConfig,
    names: Names,
    *,
    base_model: str | None = None,
    task_type: str | None = "CAUSAL_LM",
    fan_in_fan_out: bool = False,
    overwrite: bool = False,
) -> LoraConfig:
    """Write float32 adapters to a folder that PEFT can load, and return the written config.

    In PEFT, a weight that contains several kernels has a single A. If the A matrices of the kernels
    differ, they are stacked, which is exact: A is [A_1; A_2], B is block-diagonal, and rank and
    alpha increase by the same factor. The other adapters are padded with zeros to that rank.

    Args:
        path: the folder. Other files in it are kept.
        params: the parameters of a looped or scanned stack. Only their shapes are used.
        adapters: adapters from `init_lora`. Adapters whose A and B are zero are omitted.
        config: the adapter config.
        names: maps each weight's Hugging Face name to the paths of the kernels it contains, in the
            order of its outputs.
        base_model: the name of the base model to record in the folder, such as a repository ID.
        task_type: the task type in PEFT, such as "CAUSAL_LM" or "SEQ_2_SEQ_LM".
        fan_in_fan_out: whether layers are `Conv1D` (GPT-2), as PEFT requires.
        overwrite: whether to replace an adapter that the folder already contains.

    Raises:
        CheckpointError: if the folder contains an adapter and `overwrite` is False.
        ValueError: if the adapters do not match the parameters, the config or the names, if all
            adapters are zero, or if PEFT would not find the modules, as for nomic_bert.
    """
    check_path("path", path)
    if renamed_by := next(
        (x.renamed_by for x in names.values() if isinstance(x, InterleavedKernels)), ""
    ):
        raise ValueError(
            f"names belong to {renamed_by}, whose modules have different names in "
            "transformers, so PEFT would not find them; merge the adapters instead"
        )
    folder = Path(path)
    for name in (CONFIG, TENSORS):
        if os.path.lexists(folder / name) and not overwrite:
            rule = "pass overwrite=True to replace it"
            raise CheckpointError(f"{folder}: already contains {name}: {rule}")
    found, flat = matrices(params), flatten(adapters)
    modules = _modules(names, found)
    for kernel, x in flat.items():
        if kernel not in found:
            raise ValueError(f"adapters contain {kernel}, which is not a kernel of the parameters")
        *lead, inputs, outputs = found[kernel]
        wanted = (*lead, inputs, config.rank), (*lead, config.rank, outputs)
        if (np.shape(x["a"]), np.shape(x["b"])) != wanted:
            found_shapes = f"a {np.shape(x['a'])} and b {np.shape(x['b'])}"
            rule = f"must be {wanted[0]} and {wanted[1]} for rank {config.rank}"
            raise ValueError(f"{kernel} has shapes {found_shapes}: {rule}")
    kept = {kernel for kernel, x in flat.items() if np.any(x["a"]) or np.any(x["b"])}
    if not kept:
        raise ValueError("adapters: every A and B is zero, so there is nothing to save")
    module_of = {kernel: module for module, kernels in modules.items() for kernel in kernels}
    for kernel in sorted(kernel for kernel in kept if len(found[kernel]) > 2):
        rule = "is a kernel of experts, whose adapters cannot be saved; merge them instead"
        raise ValueError(f"{kernel} {rule}")
    for kernel in sorted(kept - set(module_of)):
        raise ValueError(f"{kernel} has an adapter, but no weight in names contains this kernel")
    pairs: dict[str, Pair] = {}
    for module in dict.fromkeys(module_of[kernel] for kernel in sorted(kept)):
        kernels = modules[module]
        widths = [found[kernel][1] for kernel in kernels]
        parts = {
            kernel: (np.asarray(flat[kernel]["a"]), np.asarray(flat[kernel]["b"]))
            for kernel in kernels
            if kernel in kept
        }
        # The rank of the weight stays r if all its kernels have the same A. Otherwise, each kernel
        # has its own columns.
        every_a = [a for a, _ in parts.values()]
        shared = all(np.array_equal(a, every_a[0]) for a in every_a)
        joined_a = every_a[0] if shared else np.concatenate(every_a, axis=1)
        joined_b = np.zeros((sum(widths), joined_a.shape[1]), np.float32)
        row = column = 0
        for kernel, width in zip(kernels, widths, strict=True):
            if kernel in parts:
                b = parts[kernel][1]
                joined_b[row : row + width, column : column + config.rank] = b.T
                column += 0 if shared else config.rank
            row += width
        pairs[module] = joined_a.T.astype(np.float32), joined_b[kernels.rows(widths)]
    times = max(len(a) for a, _ in pairs.values()) // config.rank
    rank = times * config.rank
    # PEFT multiplies by alpha / r, or by alpha / sqrt(r) with rslora. This keeps the product.
    alpha = config.alpha * (math.sqrt(times) if config.rslora else times)
    content = {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": fan_in_fan_out,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": config.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": _ends(list(pairs), list(modules)),
        "task_type": task_type,
        "use_dora": False,
        "use_rslora": config.rslora,
    }
    tensors = {}
    for module, (a, b) in pairs.items():  # padded with zeros to the common rank
        missing = rank - len(a)
        tensors[_key(module, "A")] = np.ascontiguousarray(np.pad(a, ((0, missing), (0, 0))))
        tensors[_key(module, "B")] = np.ascontiguousarray(np.pad(b, ((0, 0), (0, missing))))
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    # The config is written last, so an incomplete new folder cannot be loaded.
    partial = folder / (TENSORS + ".tmp")
    try:
        save_file(tensors, partial, metadata={"format": "pt"})
        os.replace(partial, folder / TENSORS)
    finally:
        partial.unlink(missing_ok=True)
    write_file(folder / CONFIG, json.dumps(content, indent=2, allow_nan=False) + "\n")
    adapted = {kernel for module in pairs for kernel in modules[module]}
    return _config(adapted, found, rank, alpha, config.rslora)


@known_keywords
def load_lora(
    path: str | os.PathLike[str], params: Params, names: Names
) -> tuple[LoraConfig, Params]:
    """Load the config and the float32 adapters from a folder written by PEFT or `save_lora`.

    If a weight contains several kernels, each gets a copy of its A and the matching part of its B.

    Args:
        path: the folder.
        params: parameters of a looped or scanned stack, or their shapes.
        names: maps each weight's Hugging Face name to the paths of the kernels it contains, in the
            order of its outputs.

    Raises:
        CheckpointError: if a file or key is corrupt, does not match the parameters, or requires an
            unsupported feature. Unsupported features are DoRA, trained biases or whole modules, a
            rank or alpha per module, an initialization that changes base weights (such as PiSSA),
            and adapters for embeddings.
        ValueError: if `names` does not match the parameters.
    """
    check_path("path", path)
    folder = Path(path)
    content = _read_config(folder / CONFIG)
    found = matrices(params)
    modules = _modules(names, found)
    rank, targeted = content["r"], _targeted(folder / CONFIG, content, list(modules))
    flat, pairs = {}, _read_tensors(folder, modules, targeted, found, rank)
    for module, (a, b) in pairs.items():
        start, kernels = 0, modules[module]
        # The rows of B are in the order of the weight; argsort inverts that order.
        b = b[np.argsort(kernels.rows([found[kernel][1] for kernel in kernels]))]
        for kernel in kernels:
            stop = start + found[kernel][1]
            flat[kernel] = {"a": jnp.array(a.T), "b": jnp.array(b[start:stop].T)}
            start = stop
    config = _config(set(flat), found, rank, float(content["lora_alpha"]), content["use_rslora"])
    return config, nest(flat, params)


def _modules(names: Names, found: Matrices) -> dict[str, InterleavedKernels]:
    """Map each Hugging Face module to the paths of the kernels that its weight contains."""
    modules = {}
    for weight, kernels in names.items():
        paths = tuple(k.removesuffix("/kernel") for k in kernels if k.endswith("/kernel"))
        if not paths or len(paths) < len(kernels):
            continue
        for path in paths:
            if path not in found:
                raise ValueError(
                    f"names contain {path}/kernel, which is not a kernel of the parameters"
                )
            if found[path][0] != found[paths[0]][0]:
                raise ValueError(
                    f"names[{weight!r}]: the kernels {paths} must have the same number of inputs"
                )
        runs = kernels.runs if isinstance(kernels, InterleavedKernels) else 1
        if any(found[path][1] % runs for path in paths):
            raise ValueError(f"names[{weight!r}]: runs={runs} must divide the outputs of {paths}")
        modules[weight.removesuffix(".weight")] = InterleavedKernels(paths, runs)
    return modules


def _config(paths: set[str], found: Matrices, rank: int, alpha: float, rslora: bool) -> LoraConfig:
    """Return the config that selects these paths with the shortest targets (and layers)."""
    blocks = {layer(path) for path in paths}
    layers = None if None in blocks else tuple(sorted(b for b in blocks if b is not None))
    for depth in range(1, 2 + max(path.count("/") for path in paths)):
        targets = tuple(sorted({"/".join(path.split("/")[-depth:]) for path in paths}))
        for within in (None, layers):
            config = LoraConfig(
                rank=rank, alpha=alpha, targets=targets, layers=within, rslora=rslora
            )
            if set(select(found, config)) == paths:
                return config
    raise AssertionError("full paths always select themselves")


def _key(module: str, matrix: str) -> str:
    return f"base_model.model.{module}.lora_{matrix}.weight"


def _ends(chosen: list[str], modules: list[str]) -> list[str]:
    """Return the shortest name suffixes that select exactly the chosen modules."""
    for depth in range(1, 2 + max(name.count(".") for name in chosen)):
        ends = sorted({".".join(name.split(".")[-depth:]) for name in chosen})
        if set(_matching(ends, modules)) == set(chosen):
            return ends
    raise AssertionError("full names always select themselves")


def _matching(ends: list[str], modules: list[str]) -> list[str]:
    return [m for m in modules if any(m == end or m.endswith(f".{end}") for end in ends)]


def _read_config(file: Path) -> JsonObject:
    """Read adapter_config.json and check that every key is supported."""
    if not _FILES.there(file.parent, CONFIG):
        raise CheckpointError(f"{file} does not exist")
    content = _FILES.json_object(_FILES.inside(file.parent, CONFIG), CONFIG_LIMIT)

    def fail(key: str, rule: str) -> None:
        value = json.dumps(content.get(key))
        value = value if len(value) <= 80 else value[:77] + "..."
        raise CheckpointError(f"{file}: {key} is {value}: {rule}")

    if content.get("peft_type") != "LORA":
        fail("peft_type", "must be 'LORA'")
    for key in sorted(content.keys() - _READ_KEYS - _IGNORED_KEYS):
        # An unknown key from a newer version of PEFT has no effect if it is empty.
        if content[key] not in (None, False, "", [], {}):
            fail(key, "is not supported")
    r, alpha = content.get("r"), content.get("lora_alpha")
    if type(r) is not int or not 0 < r < 2**31:
        fail("r", "must be a positive integer")
    if type(alpha) not in (int, float) or not 0 < alpha < 2**63:  # type: ignore[operator]
        fail("lora_alpha", "must be a positive number")
    if content.get("bias", "none") != "none":
        fail("bias", "must be 'none', since trained biases are not supported")
    for key in ("use_rslora", "fan_in_fan_out"):
        if type(content.setdefault(key, False)) is not bool:
            fail(key, "must be true or false")
    initial = content.get("init_lora_weights", True)
    if type(initial) not in (bool, str) or initial not in _KEEPS_THE_BASE:
        fail("init_lora_weights", "changes the base weights, which is not supported")
    return content


def _targeted(file: Path, content: JsonObject, modules: list[str]) -> set[str] | None:
    """Return the modules that the config selects, or None if it uses a pattern."""
    targets, without = content.get("target_modules"), content.get("exclude_modules")
    layers = content.get("layers_to_transform")
    layers = [layers] if type(layers) is int else layers
    for key, items, kind in (
        ("target_modules", targets, str),
        ("exclude_modules", without, str),
        ("layers_to_transform", layers, int),
    ):
        listed = isinstance(items, list) and all(type(item) is kind for item in items)
        if not (items is None or listed or (kind is str and isinstance(items, str))):
            raise CheckpointError(f"{file}: {key} must be a list of {kind.__name__}")
    # Matching an untrusted pattern could run forever.
    if not isinstance(targets, list) or isinstance(without, str):
        return None
    chosen = set(_matching(targets, modules)) - set(_matching(without or [], modules))
    if layers:
        # PEFT's pattern for a module's layer is greedy, so it matches the last such number.
        number = {m: re.match(r".*\.[^.]*\.(\d+)\.", m) for m in chosen}
        chosen = {module for module, n in number.items() if n and int(n[1]) in layers}
    return chosen


def _read_tensors(
    folder: Path,
    modules: Mapping[str, tuple[str, ...]],
    targeted: set[str] | None,
    found: Matrices,
    rank: int,
) -> dict[str, Pair]:
    """Read the matrices A and B of each adapted module, after checking their names and shapes."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError(
            "reading adapters requires safetensors: run pip install safetensors"
        ) from None
    file = folder / TENSORS
    if not _FILES.there(folder, TENSORS):
        rule = "the file does not exist"
        if (folder / "adapter_model.bin").exists():
            rule = rule + "; adapter_model.bin is a pickle, which this library never reads"
        raise CheckpointError(f"{file}: {rule}")
    file = _FILES.inside(folder, TENSORS)
    try:
        with safe_open(file, framework="np") as tensors:
            keys = set(tensors.keys())
            adapted = {m for m in modules if keys & {_key(m, "A"), _key(m, "B")}}
            known = {_key(module, x) for module in adapted for x in "AB"}
            for key in sorted(keys - known):
                rule = "matches no kernel in names"
                if ".lora_" not in key:
                    rule = "is a whole tensor, such as a resized embedding: merge it with PEFT's "
                    rule += "merge_and_unload"
                raise CheckpointError(f"{file}: {key[:200]} {rule}")
            for key in sorted(known - keys):
                raise CheckpointError(f"{file}: {key} is missing")
            if not adapted:
                raise CheckpointError(f"{file} contains no adapter")
            for module in sorted(adapted):
                kernels = modules[module]
                inputs, outputs = found[kernels[0]][0], sum(found[path][1] for path in kernels)
                for x, wanted in (("A", [rank, inputs]), ("B", [outputs, rank])):
                    key, part = _key(module, x), tensors.get_slice(_key(module, x))
                    if part.get_shape() != wanted:
                        rule = f"must be {wanted} for rank {rank} and these parameters"
                        raise CheckpointError(f"{file}: {key} has shape {part.get_shape()}: {rule}")
                    if part.get_dtype() not in ("F32", "F16", "BF16"):
                        rule = "must be F32, F16, or BF16"
                        raise CheckpointError(f"{file}: {key} has dtype {part.get_dtype()}: {rule}")
            if targeted is not None and adapted != targeted:
                module = min(adapted ^ targeted)
                verb = "has" if module in adapted else "lacks"
                rule = f"this contradicts target_modules of {CONFIG}"
                raise CheckpointError(f"{file}: {verb} an adapter for {module}: {rule}")
            a, b = (
                {m: tensors.get_tensor(_key(m, x)).astype(np.float32) for m in adapted}
                for x in "AB"
            )
            return {module: (a[module], b[module]) for module in sorted(adapted)}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read ({error})") from None
