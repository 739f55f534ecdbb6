"""Loading of text models, and the program of an exported decoder, without compilation."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import ModelConfig, RecurrentConfig, TrainConfig, loading
from transformer_jax.checkpoints.checkpoint import CheckpointError
from transformer_jax.config import LoraConfig
from transformer_jax.loading import TextModel
from transformer_jax.text import decode_exported
from transformer_jax.tokenizers.trained import CharTokenizer

CONFIG = ModelConfig(vocab_size=11, d_model=8, num_layers=1, num_heads=2)


def test_model_computes_in_dtype_of_its_parameters():
    params = {"a": np.float32([1.5, 2**-20]), "count": np.int32([3])}
    model = TextModel(CONFIG, params, CharTokenizer("abc"), (9,))
    found = loading.with_param_dtype(model, "bfloat16")
    assert found.config == replace(CONFIG, dtype="bfloat16") and found.stop_ids == (9,)
    assert found.params["a"].dtype == jnp.bfloat16 and found.params["count"].dtype == jnp.int32
    recurrent = replace(model, config=RecurrentConfig(vocab_size=11, d_embed=3, d_hidden=3))
    for call, message in (
        (lambda: loading.with_param_dtype(recurrent, "bfloat16"), "dtype is 'bfloat16'"),
        (lambda: loading.with_quantized_weights(recurrent, "int8"), "weights is 'int8'"),
    ):
        with pytest.raises(ValueError, match=f"{message}: RecurrentConfig supports only float32"):
            call()


def test_quantized_weights_include_embedding_tables(monkeypatch):
    calls: list[Any] = []
    monkeypatch.setattr(loading, "quantize", lambda *args, **options: calls.append((args, options)))
    loading.with_quantized_weights(TextModel(CONFIG, {"a": 1}, CharTokenizer("abc")), "int4")
    assert calls == [(({"a": 1}, "int4"), {"embeddings": True})]


def test_adapter_run_locates_its_base_model(monkeypatch, tmp_path):
    run = TrainConfig(model=CONFIG)
    assert loading._with_base(run, None) is run
    with pytest.raises(ValueError, match="init_from is 'm': the run has no adapters"):
        loading._with_base(run, "m")
    tuned = replace(run, lora=LoraConfig(), init_from="old", tokenizer="pretrained")
    assert loading._with_base(tuned, tmp_path) == replace(tuned, init_from=str(tmp_path))

    def lost(where: str | None) -> str:
        with pytest.raises((ValueError, OSError)) as error, loading.naming_run("run", where):
            raise FileNotFoundError("no model")
        return str(error.value)

    assert lost(str(tmp_path)) == lost(None) == "no model"
    assert lost(str(tmp_path / "gone")).startswith("run 'run' started from '")
    assert lost(str(tmp_path / "gone")).endswith("if it has moved, pass init_from=FOLDER")

    stacks = dict(block_0={"w": np.ones(3)}, out=7), dict(blocks={"w": np.ones((1, 3))}, out=7)
    loaded = SimpleNamespace(params=stacks[0])
    monkeypatch.setattr(loading, "load_run", lambda path: loaded)
    monkeypatch.setattr(loading, "load_pretrained", lambda path, **options: (path, options))
    expected = {"dtype": "float32", "scan_layers": True}
    assert loading.base_params(str(tmp_path), True) == expected
    assert not loading.is_run(str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    assert loading.is_run(str(tmp_path))
    for loaded.params in stacks:
        for scanned in False, True:
            found = loading.base_params(str(tmp_path), scanned)
            jax.tree.map(np.testing.assert_array_equal, found, stacks[scanned])
    monkeypatch.setattr(loading, "sha256_of", lambda params: "1" * 64)
    loading.check_base("m", {}, {"base_sha256": "1" * 64})
    message = (
        "m: parameters have sha256 1{16}, but the run started from 2{16}, so this is a different"
    )
    with pytest.raises(CheckpointError, match=message):
        loading.check_base("m", {}, {"base_sha256": "2" * 64})


def test_exported_program_prints_token_ids_or_text(monkeypatch, capsys, tmp_path):
    calls: list[Any] = []

    def decode(folder, prompts, count):
        calls.append((folder, prompts, count))
        return [[*prompt, 7] for prompt in prompts]

    def run(*arguments: str) -> list[str]:
        monkeypatch.setattr(decode_exported.sys, "argv", ["decode.py", *arguments])
        decode_exported.main()
        return capsys.readouterr().out.splitlines()

    monkeypatch.setattr(decode_exported, "decode", decode)
    monkeypatch.setattr(decode_exported, "__file__", str(tmp_path / "decode.py"))
    about = {"context": 70, "first": [1]}
    monkeypatch.setattr(decode_exported, "read_about", lambda folder: about)
    assert run("12,5 , 9", " 3 ") == ["12,5,9,7", "3,7"]
    assert calls.pop() == (tmp_path, [[12, 5, 9], [3]], 64)
    about["context"] = 11
    run("1,2,3")
    run("1,2", "--num-tokens", "5")
    run(",".join("1" * 12))
    assert [count for _, _, count in calls] == [11 - 3 + 1, 5, 1]
    for wrong in ("a", "1,", "1 2", "-1", ""):
        with pytest.raises(ValueError, match="must be token IDs, such as 12,5,9: the folder has"):
            decode_exported._ids(wrong)
    (tmp_path / "tokenizer.json").touch()
    letters = SimpleNamespace(
        encode=lambda text, add_special_tokens: SimpleNamespace(
            ids=[ord(c) - 97 for c in text] + [99] * add_special_tokens
        ),
        decode=lambda ids: "".join(chr(i + 97) for i in ids),
    )
    monkeypatch.setattr(decode_exported, "_read", lambda file, read: letters)
    assert run("cd") == ["bcdh"] and calls[-1][1] == [[1, 2, 3]]


def test_adapters_are_merged_with_their_base_model(monkeypatch):
    """Parts that the run trained without adapters are not taken from the base model."""
    monkeypatch.setattr(
        loading, "init_params", lambda config, key: {"a": jnp.ones(2), "b": jnp.ones(3)}
    )
    base = {"a": np.float32([5, 6]), "b": np.float32([7, 8, 9])}
    calls: list[Any] = []

    def base_params(init_from, scanned):
        calls.append((init_from, scanned))
        return base

    monkeypatch.setattr(loading, "base_params", base_params)
    monkeypatch.setattr(loading, "check_base", lambda *args: calls.append(args))
    config = SimpleNamespace(
        init_from="m", model=replace(CONFIG, scan_layers=True), trained_whole=("b",)
    )
    found = loading._adapted_base(config, {"base_sha256": "x"})
    assert {name: np.asarray(x).tolist() for name, x in found.items()} == {
        "a": [5, 6],
        "b": [0] * 3,
    }
    assert calls == [("m", True), ("m", base, {"base_sha256": "x"})]


def test_run_is_loaded_with_both_tokenizers_and_the_current_base_model(monkeypatch, tmp_path):
    coders = {name: CharTokenizer(name) for name in ("abc", "xyz")}
    run = TrainConfig(model=CONFIG)
    metadata = {"tokenizer_sha256": "abc"}
    folder = SimpleNamespace(
        path="r", checkpoints=tmp_path, read_config=lambda: run,
        read_tokenizer=coders.get, read_source_tokenizer=coders.get,
    )  # fmt: skip
    monkeypatch.setattr(loading, "RunFolder", lambda path: folder)
    monkeypatch.setattr(loading, "_chosen_step", lambda folder, which: ("last", 7))
    monkeypatch.setattr(
        loading.checkpoint, "read_manifest", lambda path: SimpleNamespace(metadata=metadata)
    )
    trained = {"lora": {"a": 1}, "whole": {}}
    monkeypatch.setattr(loading, "_restore_trained", lambda config, saved: trained)
    checked: list[Any] = []
    monkeypatch.setattr(loading, "_adapted_base", lambda config, found: checked.append(config))

    assert loading.load_run("r").source_tokenizer is None
    metadata["source_tokenizer_sha256"] = "xyz"
    found = loading.load_run("r")
    assert (found.tokenizer, found.source_tokenizer) == (coders["abc"], coders["xyz"])

    run = replace(run, lora=LoraConfig(), init_from="old", tokenizer="pretrained")
    assert loading.load_adapters("r") == (run, {"a": 1}) and checked == []
    moved = replace(run, init_from=str(tmp_path))
    assert loading.load_adapters("r", init_from=tmp_path) == (moved, {"a": 1})
    assert checked == [moved]
