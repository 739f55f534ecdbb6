"""Load and save LoRA adapters in the layout of Hugging Face's PEFT.

    adapter_config.json         rank, alpha, the modules that have an adapter
    adapter_model.safetensors   base_model.model.<module>.lora_A.weight [r, inputs]
                                base_model.model.<module>.lora_B.weight [outputs, r]

`names` maps each Hugging Face weight to the kernels it holds, by their paths in a looped stack:

    {"model.layers.3.self_attn.q_proj.weight": ("decoder/block_3/attention/query/kernel",)}

A weight that holds several kernels side by side lists them in the order of its outputs: GPT-2's
`c_attn` holds query, key and value. `InTurn` says that their outputs take turns, by heads, as in
GPT-NeoX. Entries that are no kernels (biases, norms) are skipped.

Every key of adapter_config.json is read, is known to change nothing here, or must be empty. Shapes
are compared with the parameters before anything is read. Needs the package `safetensors`.
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
from transformer_jax.pytree import Array, Params
from transformer_jax.untrusted_files import JsonObject, Untrusted, check_path

Names = Mapping[str, Sequence[str]]
"""Hugging Face weight to the paths of the kernels it holds, in the order of its outputs."""


class InTurn(tuple[str, ...]):
    """Name the kernels of a weight whose outputs take turns, in `runs` runs of a part of each."""

    runs: int
    renamed_by: str

    def __new__(cls, names: Iterable[str], runs: int = 1, renamed_by: str = "") -> InTurn:
        """Take the paths in the order of a run, and how many runs there are.

        `renamed_by` is a family whose modules transformers names differently from its files.
        """
        made = super().__new__(cls, names)
        made.runs, made.renamed_by = runs, renamed_by
        return made

    def rows(self, widths: Sequence[int]) -> np.ndarray:
        """Return the row of the kernels side by side that each row of the weight is."""
        ends = np.cumsum(widths)
        own = [np.arange(end - width, end) for width, end in zip(widths, ends, strict=True)]
        return np.concatenate([x.reshape(self.runs, -1) for x in own], axis=1).reshape(-1)


Pair = tuple[np.ndarray, np.ndarray]
"""A f32[r, inputs] and B f32[outputs, r] of a module, as PEFT lays them out."""

CONFIG, TENSORS = ADAPTER, "adapter_model.safetensors"
CONFIG_LIMIT = 2**20
"""Largest adapter_config.json that is read, in bytes."""

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
"""Values of init_lora_weights that keep the base weights; pissa, olora and loftq change them."""


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
    """Write adapters, in f32, as a folder that PEFT loads, and return the config as written.

    A weight that holds several of our kernels has one A there. If ours differ they are stacked,
    which is exact: A is [A_1; A_2], B is block diagonal, rank and alpha are as many times as large;
    all other adapters are padded with zeros to that rank.

    Args:
        path: the folder, in which other files stay.
        params: parameters or their shapes, of a looped or a scanned stack; nothing else of them is
            read.
        adapters: as `init_lora` makes them; those whose A and B are zero are left out.
        config: of the adapters.
        names: Hugging Face's name of each weight, and the paths of the kernels it holds, in the
            order of its outputs.
        base_model: what the folder says the adapters are of, such as the id of a repository.
        task_type: PEFT's, such as "CAUSAL_LM" or "SEQ_2_SEQ_LM".
        fan_in_fan_out: True for models of `Conv1D`, which is GPT-2: PEFT wants to be told.
        overwrite: replace an adapter that the folder holds already.

    Raises:
        CheckpointError: if the folder holds an adapter, unless `overwrite`.
        ValueError: if adapters do not fit parameters, config or names, or all are zero; or if PEFT
            would not find the modules, as in a nomic_bert.
    """
    check_path("path", path)
    if renamed_by := next((x.renamed_by for x in names.values() if isinstance(x, InTurn)), ""):
        raise ValueError(
            f"names is of a {renamed_by}: transformers names its modules differently from its "
            "files, and PEFT would not find them: merge the adapters"
        )
    folder = Path(path)
    for name in (CONFIG, TENSORS):
        if os.path.lexists(folder / name) and not overwrite:
            rule = "which would be lost; overwrite=True replaces it"
            raise CheckpointError(f"{folder}: has {name}, {rule}")
    found, flat = matrices(params), flatten(adapters)
    modules = _modules(names, found)
    for kernel, x in flat.items():
        if kernel not in found:
            raise ValueError(f"adapters have {kernel}: the parameters have no such kernel")
        *lead, inputs, outputs = found[kernel]
        wanted = (*lead, inputs, config.rank), (*lead, config.rank, outputs)
        if (np.shape(x["a"]), np.shape(x["b"])) != wanted:
            said = f"a {np.shape(x['a'])} and b {np.shape(x['b'])}"
            rule = f"rank {config.rank} wants {wanted[0]} and {wanted[1]}"
            raise ValueError(f"{kernel}: {said}: {rule}")
    kept = {kernel for kernel, x in flat.items() if np.any(x["a"]) or np.any(x["b"])}
    if not kept:
        raise ValueError("adapters: every A and B is zero, there is nothing to save")
    module_of = {kernel: module for module, kernels in modules.items() for kernel in kernels}
    for kernel in sorted(kernel for kernel in kept if len(found[kernel]) > 2):
        rule = "is of experts, whose adapters are not written here: merge them"
        raise ValueError(f"{kernel}: {rule}")
    for kernel in sorted(kept - set(module_of)):
        raise ValueError(f"{kernel}: has an adapter, and names says of no weight that it holds it")
    pairs: dict[str, Pair] = {}
    for module in dict.fromkeys(module_of[kernel] for kernel in sorted(kept)):
        kernels = modules[module]
        widths = [found[kernel][1] for kernel in kernels]
        parts = [flat[kernel] if kernel in kept else None for kernel in kernels]
        a, b = _joined(parts, widths, config.rank)
        pairs[module] = a, b[kernels.rows(widths)]
    times = max(len(a) for a, _ in pairs.values()) // config.rank
    rank = times * config.rank
    # PEFT multiplies by alpha / r, and by alpha / sqrt(r) with rslora: the product stays.
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
    # In a new folder the config comes last: without it there is no adapter to load.
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
    """Load the config and the f32 adapters of a folder that PEFT or `save_lora` wrote.

    A weight that holds several kernels gives each a copy of its A and its part of B.

    Args:
        path: the folder.
        params: parameters of the model or their shapes, of a looped or a scanned stack.
        names: Hugging Face's name of each weight, and the paths of the kernels it holds, in the
            order of its outputs.

    Raises:
        CheckpointError: if a file or key is damaged, does not fit the parameters or asks for what
            is not supported, which are DoRA, trained biases or whole modules, a rank or alpha per
            module, initialisations that change the base weights (PiSSA, ...) and adapters of
            embeddings.
        ValueError: if `names` does not fit the parameters.
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
        # The rows of B lie as those of the weight; argsort is the inverse of that order.
        b = b[np.argsort(kernels.rows([found[kernel][1] for kernel in kernels]))]
        for kernel in kernels:
            stop = start + found[kernel][1]
            flat[kernel] = {"a": jnp.array(a.T), "b": jnp.array(b[start:stop].T)}
            start = stop
    config = _config(set(flat), found, rank, float(content["lora_alpha"]), content["use_rslora"])
    return config, nest(flat, params)


def _modules(names: Names, found: Matrices) -> dict[str, InTurn]:
    """Map each Hugging Face module to the paths of our modules whose kernels it holds."""
    modules = {}
    for weight, kernels in names.items():
        paths = tuple(k.removesuffix("/kernel") for k in kernels if k.endswith("/kernel"))
        if not paths or len(paths) < len(kernels):
            continue
        for path in paths:
            if path not in found:
                raise ValueError(f"names has {path}/kernel: the parameters have no such kernel")
            if found[path][0] != found[paths[0]][0]:
                raise ValueError(f"names has {weight}: its kernels differ in inputs: {paths}")
        runs = kernels.runs if isinstance(kernels, InTurn) else 1
        if any(found[path][1] % runs for path in paths):
            raise ValueError(
                f"names has {weight}: {runs} runs do not divide the outputs of {paths}"
            )
        modules[weight.removesuffix(".weight")] = InTurn(paths, runs)
    return modules


def _joined(parts: Sequence[Mapping[str, Array] | None], widths: list[int], rank: int) -> Pair:
    """Join the adapters of several kernels side by side; r is the rank if their As are equal."""
    given = [None if x is None else (np.asarray(x["a"]), np.asarray(x["b"])) for x in parts]
    present = [x for x in given if x is not None]
    shared = all(np.array_equal(a, present[0][0]) for a, _ in present)
    columns = rank if shared else rank * len(present)
    a = present[0][0] if shared else np.concatenate([a for a, _ in present], axis=1)
    b = np.zeros((sum(widths), columns), np.float32)
    row = column = 0
    for x, width in zip(given, widths, strict=True):
        if x is not None:
            b[row : row + width, column : column + rank] = x[1].T
            column += 0 if shared else rank
        row += width
    return a.T.astype(np.float32), b


def _config(paths: set[str], found: Matrices, rank: int, alpha: float, rslora: bool) -> LoraConfig:
    """Return the config with the shortest targets, and the layers, that select these paths."""
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
    raise AssertionError("whole paths select themselves")


def _key(module: str, matrix: str) -> str:
    return f"base_model.model.{module}.lora_{matrix}.weight"


def _ends(chosen: list[str], modules: list[str]) -> list[str]:
    """Return the shortest ends of names that select exactly the chosen modules."""
    for depth in range(1, 2 + max(name.count(".") for name in chosen)):
        ends = sorted({".".join(name.split(".")[-depth:]) for name in chosen})
        if set(_matching(ends, modules)) == set(chosen):
            return ends
    raise AssertionError("whole names select themselves")


def _matching(ends: list[str], modules: list[str]) -> list[str]:
    return [m for m in modules if any(m == end or m.endswith(f".{end}") for end in ends)]


def _read_config(file: Path) -> JsonObject:
    """Read adapter_config.json and check that every key is supported."""
    if not _FILES.there(file.parent, CONFIG):
        raise CheckpointError(f"{file}: there is no such file")
    content = _FILES.json_object(_FILES.inside(file.parent, CONFIG), CONFIG_LIMIT)

    def fail(key: str, rule: str) -> None:
        shown = json.dumps(content.get(key))
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise CheckpointError(f"{file}: {key} is {shown}: {rule}")

    if content.get("peft_type") != "LORA":
        fail("peft_type", "must be 'LORA'")
    for key in sorted(content.keys() - _READ_KEYS - _IGNORED_KEYS):
        # A key of a newer version of PEFT changes nothing while it is empty.
        if content[key] not in (None, False, "", [], {}):
            fail(key, "is not supported")
    r, alpha = content.get("r"), content.get("lora_alpha")
    if type(r) is not int or not 0 < r < 2**31:
        fail("r", "must be a positive integer")
    if type(alpha) not in (int, float) or not 0 < alpha < 2**63:  # type: ignore[operator]
        fail("lora_alpha", "must be a positive number")
    if content.get("bias", "none") != "none":
        fail("bias", "trained biases are not supported")
    for key in ("use_rslora", "fan_in_fan_out"):
        if type(content.setdefault(key, False)) is not bool:
            fail(key, "must be true or false")
    initial = content.get("init_lora_weights", True)
    if type(initial) not in (bool, str) or initial not in _KEEPS_THE_BASE:
        fail("init_lora_weights", "changes the base weights, which is not supported")
    return content


def _targeted(file: Path, content: JsonObject, modules: list[str]) -> set[str] | None:
    """Return the modules that the config selects; None if it is a pattern, which is not run."""
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
            raise CheckpointError(f"{file}: {key}: must be a list of {kind.__name__}")
    # A pattern of somebody else may take for ever, so it is not run.
    if not isinstance(targets, list) or isinstance(without, str):
        return None
    chosen = set(_matching(targets, modules)) - set(_matching(without or [], modules))
    if layers:
        # PEFT's own rule for the number of a module's layer, which is greedy: the last such number
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
    """Read A and B of each module that has an adapter; names and shapes are checked first."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError("adapters are read by safetensors: pip install safetensors") from None
    file = folder / TENSORS
    if not _FILES.there(folder, TENSORS):
        rule = "there is no such file"
        if (folder / "adapter_model.bin").exists():
            rule = "is not there; adapter_model.bin is a pickle, which is not read"
        raise CheckpointError(f"{file}: {rule}")
    file = _FILES.inside(folder, TENSORS)
    try:
        with safe_open(file, framework="np") as tensors:
            keys = set(tensors.keys())
            adapted = {m for m in modules if keys & {_key(m, "A"), _key(m, "B")}}
            known = {_key(module, x) for module in adapted for x in "AB"}
            for key in sorted(keys - known):
                raise CheckpointError(f"{file}: {key[:200]}: is the adapter of no known kernel")
            for key in sorted(known - keys):
                raise CheckpointError(f"{file}: {key} is missing")
            if not adapted:
                raise CheckpointError(f"{file}: has no adapter")
            for module in sorted(adapted):
                kernels = modules[module]
                inputs, outputs = found[kernels[0]][0], sum(found[path][1] for path in kernels)
                for x, wanted in (("A", [rank, inputs]), ("B", [outputs, rank])):
                    key, part = _key(module, x), tensors.get_slice(_key(module, x))
                    if part.get_shape() != wanted:
                        rule = f"rank {rank} of these parameters wants {wanted}"
                        raise CheckpointError(f"{file}: {key} is {part.get_shape()}: {rule}")
                    if part.get_dtype() not in ("F32", "F16", "BF16"):
                        rule = "must be F32, F16 or BF16"
                        raise CheckpointError(f"{file}: {key} is {part.get_dtype()}: {rule}")
            if targeted is not None and adapted != targeted:
                module = min(adapted ^ targeted)
                verb = "has" if module in adapted else "lacks"
                rule = f"target_modules of {CONFIG} says otherwise"
                raise CheckpointError(f"{file}: {verb} an adapter of {module}: {rule}")
            a, b = (
                {m: tensors.get_tensor(_key(m, x)).astype(np.float32) for m in adapted}
                for x in "AB"
            )
            return {module: (a[module], b[module]) for module in sorted(adapted)}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from None
