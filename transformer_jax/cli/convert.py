"""Write a model as a Hugging Face folder: config.json, safetensors and a tokenizer.

python -m transformer_jax convert --model RUN --to FOLDER            a run of train.py
python -m transformer_jax convert --model RUN --to FOLDER --adapter  only its adapters, for PEFT
python -m transformer_jax convert --model FOLDER_OR_ID --to FOLDER   a published model
python -m transformer_jax convert --model FILE.gguf --to FOLDER      a llama.cpp file
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformer_jax.cli.command import ModelOptions, run
from transformer_jax.config import ConfigError
from transformer_jax.config.fields import check_new_folder
from transformer_jax.config.model import as_transformer

TASK_TYPES = {"decoder": "CAUSAL_LM", "encoder-decoder": "SEQ_2_SEQ_LM"}
"""PEFT's task types. PEFT has no type for masked language models."""


@dataclass(frozen=True, kw_only=True)
class Convert(ModelOptions):
    """Command-line options."""

    to: str
    """Output folder; must be new or empty."""
    family: str | None = None
    """For a run: the model_type to write; default: the first type that fits."""
    adapter: bool = False
    """For a LoRA run: write only the adapters, as a PEFT folder."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the saved parameters; default: as stored."""
    shard_gb: float | None = None
    """Maximum file size, in 10^9 bytes; default: 5."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run(Convert, argv, lambda options: print(*convert(options), sep="\n"))


def convert(options: Convert) -> list[str]:
    """Convert the model and return lines that describe the files."""
    from transformer_jax.loading import is_run
    from transformer_jax.pretrained.safetensors_folder import SHARD_BYTES

    # Check the options before loading anything large.
    from_run = is_run(options.model)
    for name in ("family", "checkpoint", "init_from", "adapter"):
        if not from_run and (value := getattr(options, name)) not in (None, False):
            rule = f"allowed only for a run, but {options.model!r} is not one"
            raise ConfigError(f"{name} is {value!r}: {rule}")
    for name in ("dtype", "shard_gb"):
        if options.adapter and getattr(options, name) is not None:
            raise ConfigError(
                f"{name} cannot be used with adapter: an adapter is one file in float32"
            )
    shard_bytes = SHARD_BYTES
    if (gigabytes := options.shard_gb) is not None:
        if not 0 < gigabytes < 10**6:
            raise ConfigError(f"shard_gb is {gigabytes}: must be above 0 and below 10**6")
        shard_bytes = max(int(gigabytes * 10**9), 1)
    check_new_folder("to", options.to)
    target = Path(options.to)
    # `lexists` also finds a dangling symlink, which a write would follow.
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"to is {str(target)!r}: must be new or empty")
    if options.adapter:
        import jax

        from transformer_jax.loading import load_adapters
        from transformer_jax.models.factory import init_params
        from transformer_jax.pretrained.peft import save_lora
        from transformer_jax.pretrained.tensors import tensor_names
        from transformer_jax.text.save import written_as

        training, adapters = load_adapters(
            options.model, options.checkpoint, init_from=options.init_from
        )
        model = as_transformer(training.model)
        assert training.lora is not None
        family, model = written_as(model, options.family)
        names = tensor_names(model, family)
        shapes = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
        written = save_lora(
            target, shapes, adapters, training.lora, names, base_model=training.init_from or "",
            task_type=TASK_TYPES.get(model.kind), fan_in_fan_out=family == "gpt2",
        )  # fmt: skip
        count = sum(leaf.size for leaf in jax.tree.leaves(adapters))
        return [
            f"{target}: adapters with {count:,} parameters and rank {written.rank} for {family}; "
            f"base model: {training.init_from}"
        ]
    if from_run:
        settings: dict[str, Any] = dict(
            family=options.family, dtype=options.dtype, shard_bytes=shard_bytes
        )
        return options.load().save(target, **settings)
    from transformer_jax.pretrained.load import load_pretrained
    from transformer_jax.pretrained.weights import open_weights
    from transformer_jax.text.save import save_published

    folder = open_weights(options.model)  # `load` needs a tokenizer, which may be missing
    config, params = load_pretrained(folder.path, dtype=options.dtype)
    return save_published(target, folder, config, params, shard_bytes)
