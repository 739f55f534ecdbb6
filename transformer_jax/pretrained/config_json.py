"""Conversion between the config.json of a published checkpoint and `ModelConfig`.

A family (in `families`) lists the keys and their meaning. This module finds the family and rejects
keys that the family does not read. It reads back each config that it writes, so a config is saved
exactly or not at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from transformer_jax.config import ConfigError, ModelConfig, Rope
from transformer_jax.pretrained.families import FAMILIES, ConfigKeys, Family
from transformer_jax.pretrained.families.keys import DEPTH_KEYS, EXPERT_KEYS, effective
from transformer_jax.pretrained.safetensors_folder import CONFIG
from transformer_jax.untrusted_files import JsonObject

RUNTIME_FIELDS = ("dtype", "remat", "scan_layers", "implementation", "invariant", "init_std")
"""Fields that config.json does not store, because they specify how to run or initialize a model."""

OVERRIDABLE_FIELDS = frozenset(
    {*RUNTIME_FIELDS, "dropout", "attention_dropout"} - {"init_std"}
)  # fmt: skip
"""Fields that you can change without invalidating the parameters of a checkpoint."""

UNSUPPORTED_HEADS = ("ForMultipleChoice",)
"""Suffixes of `architectures` whose tensor names can conflict with those of a supported head."""

_LATENT = (
    "of the models with latent attention, deepseek_v2, deepseek_v3 and kimi_linear are supported"
)
WITHOUT_PARTS = (
    dict.fromkeys(("deepseek_v32", "kimi_k2", "minicpm3"), _LATENT)
    | dict.fromkeys(
        ("deberta", "deberta-v2"), "this library does not implement its disentangled attention"
    )
    | dict.fromkeys(
        ("lfm2_moe", "lfm2_vl", "lfm3"), "of the models by Liquid AI, only lfm2 is supported"
    )
)
"""Reasons why models cannot be loaded, keyed by each unsupported `model_type` that users may
try."""


def family_of(content: JsonObject, where: str) -> Family:
    """Return the family for the `model_type` in `content`.

    `where` is the file name for error messages.
    """
    kind = content.get("model_type")
    if isinstance(kind, str) and kind in WITHOUT_PARTS:
        raise ConfigError(f"{where}: model_type is {kind!r}: {WITHOUT_PARTS[kind]}")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"{where}: model_type is {kind!r:.80}: must be one of {known}")
    return FAMILIES[kind]


def read_config(content: JsonObject, tensors: Iterable[str], where: str) -> ModelConfig:
    """Return the config that a config.json describes, given the names of the folder's tensors.

    Raises ConfigError if a key is unknown, has the wrong type, or would change the outputs of the
    model in an unsupported way. The message contains `where`, the key and its value.
    """
    return read_keys(content, tensors, where)[0]


def read_keys(
    content: JsonObject, tensors: Iterable[str], where: str
) -> tuple[ModelConfig, ConfigKeys]:
    """Return the config, and a `ConfigKeys` that records which keys were read."""
    family, names = family_of(content, where), frozenset(tensors)
    counting = DEPTH_KEYS - EXPERT_KEYS if family.joined_experts else DEPTH_KEYS
    keys = ConfigKeys(content, where, family.name, names, counting)
    architectures = keys.take("architectures", None)
    keys.ignore("architectures")
    for name in architectures if isinstance(architectures, list) else ():
        if isinstance(name, str) and name.endswith(UNSUPPORTED_HEADS):
            rule = "multiple-choice heads are not supported"
            keys.fail("architectures", architectures, rule)
    try:
        config = family.read(keys)
    # Scaling factors in an untrusted file may overflow or cause a division by zero.
    except ArithmeticError as error:
        raise ConfigError(f"{where}: its numbers are inconsistent ({error})") from None
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(where) else f"{where}: {text}") from None
    keys.check_all_read()
    if (unrotated := _unrotated(family, config)) is not None:
        raise ConfigError(f"{where}: partial_rotary_factor must be 1: {unrotated}")
    return config, keys


def write_config(family: Family, config: ModelConfig) -> JsonObject:
    """Return the keys of config.json that describe a config.

    Raises ConfigError if the family cannot express a field. This is the case if any field except
    `RUNTIME_FIELDS` would have a different meaning when it is read back.
    """
    rope = config.positions
    if isinstance(rope, Rope) and rope.length is not None:  # also a runtime setting
        rope = dataclasses.replace(rope, length=None)
        config = dataclasses.replace(config, positions=rope, max_len=rope.original_len or 1)
    if not config.ff_dim:
        raise ConfigError(f"d_ff is 0: every block in the family {family.name} has a feed-forward")
    content = {"model_type": family.name, **family.write(config)}
    try:
        back = read_config(content, table_names(family, config), CONFIG)
    except ConfigError as error:
        raise ConfigError(f"the family {family.name} cannot express this config: {error}") from None
    for field in dataclasses.fields(ModelConfig):
        name = field.name
        one, two = _meaning(config, name), _meaning(back, name)
        if name in RUNTIME_FIELDS or one == two:
            continue
        if type(one) is type(two) and dataclasses.is_dataclass(one):  # name the inner field
            inner = next(
                x.name
                for x in dataclasses.fields(one)
                if getattr(one, x.name) != getattr(two, x.name)
            )
            name, one, two = f"{name}.{inner}", getattr(one, inner), getattr(two, inner)
        raise ConfigError(f"{name} is {one!r}: must be {two!r} in the family {family.name}")
    return content


def written_family(config: ModelConfig, name: str | None = None) -> str:
    """Return the `model_type` under which to save a config.

    If `name` is None, this is the first family that can express the config. Raises ConfigError if
    the family (or, without a name, every family) cannot express the config, or if transformers
    would compute different outputs.
    """
    if name is not None and name not in FAMILIES:
        raise ConfigError(f"family is {name!r}: must be one of {', '.join(FAMILIES)}")
    refused = []
    for family in FAMILIES.values() if name is None else [FAMILIES[name]]:
        try:
            if (rule := _unrotated(family, config)) is not None:
                raise ConfigError(f"positions.dims must be None: {rule}")
            write_config(family, config)
            if family.divides_width and config.d_model % config.num_heads:
                rule = f"must be divisible by num_heads={config.num_heads}"
                raise ConfigError(
                    f"d_model={config.d_model} {rule}, or transformers rejects the {family.name} "
                    "model"
                )
            return family.name
        except ConfigError as error:
            if name is not None:
                raise
            refused.append(f"{family.name}: {error}")
    fallback = "`checkpoints.checkpoint.save(folder, step, params)` writes parameters of any config"
    raise ConfigError(f"no family can express this config: {'; '.join(refused)}; {fallback}")


def check_tables(name: str, config: ModelConfig) -> None:
    """Raise ConfigError if transformers would use separate embeddings for encoder and decoder."""
    shared = not config.tie_embeddings and config.source_vocab_size is None
    if shared and FAMILIES[name].shares_if_tied:
        rule = f"with an untied output, {name} in transformers has two input tables"
        raise ConfigError(f"source_vocab_size is None: {rule}; set it, or set tie_embeddings")


def table_names(family: Family, config: ModelConfig) -> frozenset[str]:
    """Return the names of all tensors that a family writes for a config."""
    return frozenset(mapping.tensor for mapping in family.table(config))


def _unrotated(family: Family, config: ModelConfig) -> str | None:
    """Return an error message if transformers would rotate whole heads instead of parts of them."""
    rope, width = config.positions, config.key_dim
    if not isinstance(rope, Rope) or rope.dims in (None, width) or family.rotates_parts:
        return None
    able = ", ".join(name for name, other in FAMILIES.items() if other.rotates_parts)
    return (
        f"here {rope.dims} of the {width} dimensions of each head rotate, but transformers rotates "
        f"all of them in the family {family.name}; families that support partial rotation: {able}"
    )


def _meaning(config: ModelConfig, name: str) -> object:
    """Return a field's value, with None replaced by the default that it stands for."""
    match name:
        case "attention_scale":
            # Some families store the inverse square, whose root differs in the last bits.
            return float(np.float32(effective(config, name)))
        case "window":
            # (5,), (5, 5), and 5 are equivalent.
            return [config.windows[i % len(config.windows)] for i in range(config.num_layers)]
        case "mixers":
            return [config.mixer(i) for i in range(config.num_layers)]
        case "positions" if isinstance(config.positions, Rope):
            pattern = config.positions.pattern or (True,)
            turns = tuple(pattern[i % len(pattern)] for i in range(config.num_layers))
            return dataclasses.replace(config.positions, pattern=turns)
    return effective(config, name)
