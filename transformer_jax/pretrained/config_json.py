"""Read and write the config.json of a published checkpoint as a `ModelConfig`.

A family (`families`) says which keys there are and what they mean. Here the family is found, no key
is left unread, and what is written is read back: a config is saved exactly or not at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from transformer_jax.config import ConfigError, ModelConfig, Rope
from transformer_jax.pretrained.families import FAMILIES, ConfigKeys, Family
from transformer_jax.pretrained.families.keys import DEPTH_KEYS, EXPERT_KEYS, meant
from transformer_jax.pretrained.safetensors_folder import CONFIG
from transformer_jax.untrusted_files import JsonObject

RUNTIME_FIELDS = ("dtype", "remat", "scan_layers", "implementation", "init_std")
"""Fields of a config that no config.json holds: how a model is run, or was initialised."""

OVERRIDABLE_FIELDS = frozenset(
    {*RUNTIME_FIELDS, "dropout", "attention_dropout"} - {"init_std"}
)  # fmt: skip
"""Fields that may be set anew while the parameters of a checkpoint stay valid."""

UNSUPPORTED_HEADS = ("ForMultipleChoice",)
"""Ends of `architectures` whose tensors may have the names of a head that is supported."""

_LATENT = "its multi-head latent attention is not in this library"
WITHOUT_PARTS = dict.fromkeys(
    ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "minicpm3"), _LATENT
) | dict.fromkeys(("deberta", "deberta-v2"), "its disentangled attention is not in this library")
"""Values of `model_type` that people ask for, and the part of such a model that is missing."""


def family_of(content: JsonObject, where: str) -> Family:
    """Return the family that `model_type` names; `where` is the file's name for errors."""
    kind = content.get("model_type")
    if isinstance(kind, str) and kind in WITHOUT_PARTS:
        raise ConfigError(f"{where}: model_type is {kind!r}: {WITHOUT_PARTS[kind]}")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"{where}: model_type is {kind!r:.80}: must be one of {known}")
    return FAMILIES[kind]


def read_config(content: JsonObject, tensors: Iterable[str], where: str) -> ModelConfig:
    """Return the config that a config.json means in a folder with tensors of these names.

    ConfigError names `where`, the key and its value if the key is of the wrong type, would change
    the numbers in a way that is not supported, or is not known.
    """
    return read_keys(content, tensors, where)[0]


def read_keys(
    content: JsonObject, tensors: Iterable[str], where: str
) -> tuple[ModelConfig, ConfigKeys]:
    """Return the config, and the keys with a record of which of them were read."""
    family, names = family_of(content, where), frozenset(tensors)
    counting = DEPTH_KEYS - EXPERT_KEYS if family.joined_experts else DEPTH_KEYS
    keys = ConfigKeys(content, where, family.name, names, counting)
    architectures = keys.take("architectures", None)
    keys.ignore("architectures")
    for name in architectures if isinstance(architectures, list) else ():
        if isinstance(name, str) and name.endswith(UNSUPPORTED_HEADS):
            rule = "a head of several choices is not known here"
            keys.fail("architectures", architectures, rule)
    try:
        config = family.read(keys)
    # The numbers of a hostile stretch overflow, or divide by zero.
    except ArithmeticError as error:
        raise ConfigError(f"{where}: its numbers do not go together ({error})") from None
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(where) else f"{where}: {text}") from None
    keys.check_all_read()
    if (unrotated := _unrotated(family, config)) is not None:
        raise ConfigError(f"{where}: partial_rotary_factor must be 1: {unrotated}")
    return config, keys


def write_config(family: Family, config: ModelConfig) -> JsonObject:
    """Return the keys of config.json for a config.

    ConfigError names the fields that the family cannot express: the keys are read back, and every
    field but the `RUNTIME_FIELDS` must come back with the same meaning.
    """
    rope = config.positions
    if isinstance(rope, Rope) and rope.length is not None:  # how a model is run, too
        rope = dataclasses.replace(rope, length=None)
        config = dataclasses.replace(config, positions=rope, max_len=rope.original_len or 1)
    if not config.ff_dim:
        raise ConfigError(f"d_ff is 0: a {family.name} has a feed-forward in every block")
    content = {"model_type": family.name, **family.write(config)}
    try:
        back = read_config(content, table_names(family, config), CONFIG)
    except ConfigError as error:
        raise ConfigError(f"a {family.name} cannot say this config: {error}") from None
    for field in dataclasses.fields(ModelConfig):
        name = field.name
        one, two = _meaning(config, name), _meaning(back, name)
        if name in RUNTIME_FIELDS or one == two:
            continue
        if type(one) is type(two) and dataclasses.is_dataclass(one):  # name the field inside it
            inner = next(
                x.name
                for x in dataclasses.fields(one)
                if getattr(one, x.name) != getattr(two, x.name)
            )
            name, one, two = f"{name}.{inner}", getattr(one, inner), getattr(two, inner)
        raise ConfigError(f"{name} is {one!r}: a {family.name} has {two!r}")
    return content


def written_family(config: ModelConfig, name: str | None = None) -> str:
    """Return the `model_type` that a config is saved as; None takes the first that can express it.

    ConfigError says why the config cannot be saved as that family, or as any: the family cannot
    express it, or transformers would compute other numbers.
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
                    f"d_model={config.d_model} {rule}, or transformers refuses a {family.name}"
                )
            return family.name
        except ConfigError as error:
            if name is not None:
                raise
            refused.append(f"{family.name}: {error}")
    own = "`checkpoints.checkpoint.save(folder, step, params)` writes parameters of any config"
    raise ConfigError(f"no family can say this config: {'; '.join(refused)}; {own}")


def check_tables(name: str, config: ModelConfig) -> None:
    """Raise ConfigError if transformers would not share the input table of encoder and decoder."""
    shared = not config.tie_embeddings and config.source_vocab_size is None
    if shared and FAMILIES[name].shares_if_tied:
        rule = f"with an untied output, a {name} of transformers has two input tables"
        raise ConfigError(f"source_vocab_size=None: {rule}: set it, or set tie_embeddings")


def table_names(family: Family, config: ModelConfig) -> frozenset[str]:
    """Return the names of all tensors that a family writes for a config."""
    return frozenset(mapping.tensor for mapping in family.table(config))


def _unrotated(family: Family, config: ModelConfig) -> str | None:
    """Return the reason if the config rotates a part of each head and transformers does not."""
    rope, width = config.positions, config.key_dim
    if not isinstance(rope, Rope) or rope.dims in (None, width) or family.rotates_parts:
        return None
    able = ", ".join(name for name, other in FAMILIES.items() if other.rotates_parts)
    return (
        f"here {rope.dims} of the {width} dimensions of a head rotate, and transformers rotates "
        f"all of a {family.name}; families that rotate a part: {able}"
    )


def _meaning(config: ModelConfig, name: str) -> object:
    """Return a field's value; None is replaced by the value that it stands for."""
    match name:
        case "attention_scale":
            # Some families write its inverse square, and a root of that differs in the last bits.
            return float(np.float32(meant(config, name)))
        case "window":
            # (5,), (5, 5) and 5 mean the same.
            return [config.windows[i % len(config.windows)] for i in range(config.num_layers)]
        case "positions" if isinstance(config.positions, Rope):
            pattern = config.positions.pattern or (True,)
            turns = tuple(pattern[i % len(pattern)] for i in range(config.num_layers))
            return dataclasses.replace(config.positions, pattern=turns)
    return meant(config, name)
