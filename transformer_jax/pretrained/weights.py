"""Opening of published weights in a folder, a Hugging Face Hub repository or a GGUF file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from transformer_jax.config import ConfigError
from transformer_jax.pretrained.gguf import open_gguf_model
from transformer_jax.pretrained.mxfp4 import open_mxfp4
from transformer_jax.pretrained.safetensors_folder import (
    CONFIG,
    CheckpointError,
    WeightFolder,
    open_folder,
)
from transformer_jax.untrusted_files import shown


def open_weights(path_or_id: str | Path, *, revision: str | None = None) -> WeightFolder:
    """Open and check the weights of a published model, without reading any parameter.

    If the path has the suffix ".gguf" or the file starts with "GGUF", it is opened with
    `open_gguf_model`. Otherwise, it is opened with `open_folder`. MXFP4 weights appear as bfloat16.
    """
    if not isinstance(path_or_id, str | os.PathLike):
        return open_folder(path_or_id, revision=revision)  # raises the error
    path = Path(path_or_id)
    named = path.suffix.lower() == ".gguf" and not path.is_dir()
    if not named and path.is_file():  # the Hub's cache names files by their hashes
        with open(path, "rb") as stream:
            named = stream.read(4) == b"GGUF"
    if named:
        if revision is not None:
            rule = f"{shown(str(path))} is a file: revision={revision!r} requires a repository ID"
            raise CheckpointError(rule)
        return open_gguf_model(path)
    if path.is_file():
        raise CheckpointError(f"{shown(str(path))} is neither a folder nor a GGUF file")
    if path.is_dir() and not os.path.lexists(path / CONFIG):
        if files := sorted(one.name for one in path.glob("*.gguf")):
            rule = f"there is no {CONFIG}, but {shown(files[0])}: pass the path of that file"
            raise CheckpointError(f"{path}: {rule}")
    return _text_part(open_mxfp4(open_folder(path_or_id, revision=revision)))


def _text_part(folder: WeightFolder) -> WeightFolder:
    """Return a folder of Qwen3.5 with the config of its text part, or any other folder unchanged.

    The family ignores the tensors of the vision part.
    """
    text = folder.config.get("text_config")
    if folder.config.get("model_type") != "qwen3_5" or not isinstance(text, dict):
        return folder
    tied = folder.config.get("tie_word_embeddings", False)
    if text.setdefault("tie_word_embeddings", tied) != tied:
        rule = f"must equal that of text_config, {shown(text['tie_word_embeddings'])}"
        raise ConfigError(f"{folder.where}: tie_word_embeddings is {shown(tied)}: {rule}")
    return replace(folder, config={"model_type": "qwen3_5_text"} | text)
