"""T5, BART, and Marian folders without torch: goldens, rejected keys, and optional tensors.

The logits and texts of the goldens are from `transformers`: see tests/golden/write_seq2seq.py.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support import model_folders
from tests.support import model_oracle as oracle
from tests.support.model_folders import assert_loads
from transformer_jax.config import ConfigError, Learned, ModelConfig, Sinusoidal
from transformer_jax.decoding.batch_rows import fork
from transformer_jax.decoding.beams import LengthPenalty, beam_search
from transformer_jax.decoding.generation import generate
from transformer_jax.decoding.logit_processors import NoRepeatNGram
from transformer_jax.decoding.step import make_step
from transformer_jax.loading import TextModel, load_text_model
from transformer_jax.models.factory import build, init_params
from transformer_jax.models.positions import sinusoidal
from transformer_jax.pretrained.config_json import write_config
from transformer_jax.pretrained.families import FAMILIES
from transformer_jax.pretrained.load import load_pretrained
from transformer_jax.pretrained.safetensors_folder import CheckpointError
from transformer_jax.pretrained.save import save_pretrained
from transformer_jax.text.language_model import LanguageModel
from transformer_jax.tokenizers.special import with_special_tokens
from transformer_jax.tokenizers.trained import CharTokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
pytestmark = pytest.mark.usefixtures("quick_compilation")

TOLERANCE = 1e-4  # for f32 logits, which differ in summation order

every_golden = pytest.mark.parametrize("name", ["t5", "marian"])


@cache
def loaded(name: str) -> tuple[Any, Any, dict[str, np.ndarray]]:
    config, params = load_pretrained(GOLDEN / name)
    with np.load(GOLDEN / name / "case.npz") as case:
        return config, params, dict(case)


@pytest.mark.slow
@pytest.mark.long_except("True-marian", "True-t5")
@every_golden
@pytest.mark.parametrize("scan_layers", [False, True])
def test_logits_match_transformers(name, scan_layers):
    config, params, case = loaded(name)
    if scan_layers:
        config, params = load_pretrained(GOLDEN / name, scan_layers=True)
    model = build(config)
    logits, _ = jax.jit(model.apply)(
        {"params": params}, case["target"], source=case["source"],
        source_positions=case["source_positions"],
    )  # fmt: skip
    assert logits.shape == case["logits"].shape and case["logits"].std() > 0.5
    assert np.abs(logits - case["logits"]).max() <= TOLERANCE
    assert (logits.argmax(-1) == case["logits"].argmax(-1)).all()


def begun(name: str) -> tuple[Any, ...]:
    """Return the inputs of decoding: step, parameters, prompt, state."""
    config, params, case = loaded(name)
    model = build(dataclasses.replace(config, implementation="xla"))  # compiles fastest

    @jax.jit
    def begin(params, source, positions):
        arguments: dict[str, Any] = dict(positions=positions, capacity=10)
        return model.apply({"params": params}, source, **arguments, method="init_cache")

    state = begin(params, case["source"], case["source_positions"])
    return make_step(model), params, np.full((len(case["source"]), 1), case["start"]), state


@pytest.mark.slow
def test_t5_greedy_text_matches_transformers():
    case = loaded("t5")[2]
    options: Any = dict(num_tokens=9, stop=int(case["end"]), processors=(NoRepeatNGram(2),))
    np.testing.assert_array_equal(generate(*begun("t5"), **options).tokens, case["greedy"])
    assert len(set((case["greedy"] >= 0).sum(axis=1).tolist())) > 1


@pytest.mark.slow
def test_marian_beams_match_transformers():
    case = loaded("marian")[2]
    options: Any = dict(num_tokens=9, stop=int(case["end"]), processors=(NoRepeatNGram(2),))
    beams = beam_search(*begun("marian"), num_beams=4, length_penalty=LengthPenalty(1.0), **options)
    np.testing.assert_array_equal(beams.tokens[:, 0], case["beams"])
    np.testing.assert_allclose(beams.scores[:, 0], case["scores"], atol=TOLERANCE)
    assert (case["beams"] != case["greedy"]).any()


@pytest.mark.slow
def test_captured_encoder_values_match_encode():
    """The captured memory equals that of `encode`; weights on padding are zero."""
    config, params, case = loaded("t5")
    model, variables = build(config), {"params": params}
    given = (case["source"],), dict(positions=case["source_positions"])
    memory = jax.jit(lambda: model.apply(variables, *given[0], **given[1], method="encode"))()
    names = ["encoder/final_norm", "encoder/block_0/attention/weights"]
    again, seen = jax.jit(
        lambda: model.apply(variables, *given[0], **given[1], method="encode", capture=names)
    )()
    np.testing.assert_array_equal(memory, again)
    real, (last, weights) = case["source_positions"] >= 0, (np.asarray(seen[x]) for x in names)
    assert weights.shape == (3, 3, 23, 23) and not real.all()
    np.testing.assert_array_equal(last, memory)
    np.testing.assert_allclose(
        weights.sum(-1), np.broadcast_to(real[:, None], (3, 3, 23)), atol=1e-5
    )
    hidden_keys = np.broadcast_to(~real[:, None, None], weights.shape)
    assert (weights[hidden_keys] == 0).all()
    with pytest.raises(ValueError, match="encode cannot capture embedding: it reads no target"):
        model.apply(variables, *given[0], **given[1], method="encode", capture=("embedding",))


@pytest.mark.slow_except("t5")
@every_golden
def test_saved_folder_round_trips(name, tmp_path):
    config, params, _ = loaded(name)
    save_pretrained(tmp_path / "a", config, params, like=GOLDEN / name)
    one = load_file(GOLDEN / name / "model.safetensors")
    two = load_file(tmp_path / "a" / "model.safetensors")
    assert one.keys() == two.keys() and len(one) > 30
    assert all(one[k].tobytes() == two[k].tobytes() for k in one)
    assert_loads(tmp_path / "a", config, params)
    content = json.loads((tmp_path / "a" / "config.json").read_text())
    first = json.loads((GOLDEN / name / "config.json").read_text())
    assert {key: content[key] for key in first} == first


# Separate tables

SOURCE_KINDS = 47
UNTIED = dict(tie_word_embeddings=False)
APART = dict(share_encoder_decoder_embeddings=False, vocab_size=SOURCE_KINDS, decoder_vocab_size=41)
ENCODER, DECODER = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"
AS_BART: Any = dict(
    model_type="bart", share_encoder_decoder_embeddings=..., decoder_vocab_size=...,
    static_position_embeddings=..., normalize_embedding=...,
)  # fmt: skip


def drawn(rows: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, 18)) * 18**-0.5).astype(np.float32)


def with_tables(stored: dict[str, np.ndarray], *, bart: bool, **tables: Any) -> Any:
    """Return the tensors of a Marian or BART with these tables instead of the shared one."""
    stored = {name: value for name, value in stored.items() if name != "model.shared.weight"}
    if bart:
        for side in ("encoder", "decoder"):
            stored[f"model.{side}.layernorm_embedding.weight"] = np.ones(18, np.float32)
            stored[f"model.{side}.layernorm_embedding.bias"] = np.zeros(18, np.float32)
            stored[f"model.{side}.embed_positions.weight"] = drawn(33, 5)
    names = dict(
        shared="model.shared.weight",
        encoder=ENCODER,
        decoder=DECODER,
        output="lm_head.weight",
    )
    return stored | {names[table]: value for table, value in tables.items()}


SOURCE, TARGET, OUTPUT = drawn(SOURCE_KINDS, 1), drawn(41, 2), drawn(41, 3)
THREE = dict(encoder=SOURCE, decoder=TARGET, output=OUTPUT)
SEPARATE: dict[str, tuple[Any, dict[str, np.ndarray], bool]] = {
    "marian tied output": (APART, dict(encoder=SOURCE, decoder=TARGET), False),
    "marian copied output": (APART, dict(encoder=SOURCE, decoder=TARGET, output=TARGET), False),
    "marian three tables": (APART | UNTIED, THREE, False),
    "marian shared but the output": (UNTIED, dict(shared=TARGET, output=OUTPUT), False),
    "bart three tables": (AS_BART | UNTIED, dict(THREE, encoder=SOURCE[:41], shared=OUTPUT), True),
    "bart shared but the output": (AS_BART | UNTIED, dict(shared=TARGET, output=OUTPUT), True),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SEPARATE)
def test_separate_embedding_tables_are_loaded_used_and_saved(name, tmp_path):
    """Compares logits with formulas on the file's tables, and the saved file with the original."""
    keys, tables, bart = SEPARATE[name]
    folder = changed(
        tmp_path, "marian", lambda stored: with_tables(stored, bart=bart, **tables), **keys
    )
    config, params = load_pretrained(folder)
    embed = params["embed"]
    apart = "encoder" in tables
    assert config.tie_embeddings == (keys.get("tie_word_embeddings", True))
    assert config.source_vocab_size == (len(tables["encoder"]) if apart else None)
    np.testing.assert_array_equal(embed["tokens"], TARGET)
    np.testing.assert_array_equal(embed.get("source_tokens"), tables["encoder"] if apart else None)
    rng = np.random.default_rng(11)
    source = rng.integers(0, config.encoder_vocab_size, (2, 5), dtype=np.int32)
    target = rng.integers(0, 41, (2, 3), dtype=np.int32)
    got, _ = jax.jit(build(config).apply)({"params": params}, target, source=source)
    want = oracle.forward(config, params, target, source=source)
    assert want.std() > 0.2 and np.abs(got - want).max() <= TOLERANCE
    like = None
    if (
        not apart and not config.tie_embeddings
    ):  # transformers would initialise both tables at random
        like = folder
        with pytest.raises(ConfigError, match="in transformers has two input tables; set it"):
            save_pretrained(tmp_path / "saved", config, params)
    save_pretrained(tmp_path / "saved", config, params, like=like)
    assert_loads(tmp_path / "saved", config, params)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    found = load_file(folder / "model.safetensors")
    assert saved.keys() <= found.keys()
    assert all(saved[tensor].tobytes() == found[tensor].tobytes() for tensor in saved)


def test_stored_output_matrix_copy_must_match_decoder_table(tmp_path):
    folder = changed(tmp_path, "marian", lambda x: with_tables(x, bart=False, **THREE), **APART)
    with pytest.raises(CheckpointError, match=f"lm_head.weight must equal {DECODER}"):
        load_pretrained(folder)


PRE_NORM: dict[str, Any] = {
    "pegasus": dict(normalize_before=True, add_final_layer_norm=True),
    "mbart": dict(static_position_embeddings=False, normalize_embedding=True),
    "m2m_100": dict(pad_token_id=3),
}


@pytest.mark.slow_except("mbart")
@pytest.mark.parametrize("family", PRE_NORM)
def test_pre_norm_seq2seq_matches_formulas(family, tmp_path):
    """Compares logits with formulas on the file's tensors, and the saved file with the original."""

    def tensors(stored):
        rng = np.random.default_rng(17)
        stored = with_tables(stored, bart=family == "mbart", shared=TARGET)
        if family == "m2m_100":
            del stored["final_logits_bias"]
        for side in ("encoder", "decoder"):
            for part, mean in (("weight", 1.0), ("bias", 0.0)):
                value = mean + 0.3 * rng.standard_normal(18)
                stored[f"model.{side}.layer_norm.{part}"] = value.astype(np.float32)
        return stored

    keys = dict(
        model_type=family, share_encoder_decoder_embeddings=..., decoder_vocab_size=...
    ) | PRE_NORM[family]  # fmt: skip
    folder = changed(tmp_path, "marian", tensors, **keys)
    config, params = load_pretrained(folder)
    found = load_file(folder / "model.safetensors")
    for side in ("encoder", "decoder"):
        name = f"model.{side}.layer_norm.weight"
        np.testing.assert_array_equal(params[side]["norm"]["scale"], found[name])
    rng = np.random.default_rng(11)
    source, target = (rng.integers(0, 41, (2, n), dtype=np.int32) for n in (5, 3))
    got, _ = jax.jit(build(config).apply)({"params": params}, target, source=source)
    want = oracle.forward(config, params, target, source=source)
    if family == "m2m_100":
        at = Sinusoidal(layout="halves", base=10_000 ** (9 / 8), offset=4)
        assert config.positions == at and not config.logit_bias
    assert config.norm_order == "pre" and config.embedding_norm == (family == "mbart")
    assert want.std() > 0.2 and np.abs(got - want).max() <= TOLERANCE
    save_pretrained(tmp_path / "saved", config, params)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == family
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == found.keys()
    assert all(saved[tensor].tobytes() == found[tensor].tobytes() for tensor in saved)


def test_bart_rejects_separate_vocabularies_and_tied_separate_tables():
    def config(**change: Any) -> ModelConfig:
        return ModelConfig(
            kind="encoder-decoder", vocab_size=41, norm_order="post", embedding_norm=True,
            positions=Learned(offset=2), logit_bias=True, activation="gelu", **change,
        )  # fmt: skip

    written = write_config(FAMILIES["bart"], config(source_vocab_size=41, tie_embeddings=False))
    assert written["is_encoder_decoder"] is True
    for wrong in (dict(source_vocab_size=43, tie_embeddings=False), dict(source_vocab_size=41)):
        with pytest.raises(ConfigError, match=r"vocab_size is \d+: must be \w+ in the family bart"):
            write_config(FAMILIES["bart"], config(**wrong))


@pytest.mark.long
def test_generation_works_with_separate_source_vocabulary(tmp_path):
    """Compares greedy and beam search with a full forward pass."""
    tables = dict(encoder=SOURCE, decoder=TARGET)
    folder = changed(tmp_path, "marian", lambda x: with_tables(x, bart=False, **tables), **APART)
    config, params = load_pretrained(folder)
    model = build(dataclasses.replace(config, implementation="xla"))
    source = np.array([[46, 41, 3], [2, 45, 44]], np.int32)
    state = model.apply({"params": params}, source, capacity=5, method="init_cache")
    start = np.full((2, 1), 40)
    written = generate(make_step(model), params, start, fork(state, 1), num_tokens=4).tokens
    best = beam_search(make_step(model), params, start, state, num_tokens=4, num_beams=1)
    np.testing.assert_array_equal(best.tokens[:, 0], written)
    target = np.concatenate([start, written[:, :-1]], axis=1).astype(np.int32)
    logits = oracle.forward(config, params, target, source=source)
    np.testing.assert_array_equal(logits.argmax(-1), written)


def test_model_with_two_vocabularies_cannot_be_loaded_for_text(tmp_path):
    """A single tokenizer would encode the source with ids of the target."""
    tables = dict(encoder=SOURCE, decoder=TARGET)
    folder = changed(tmp_path, "marian", lambda x: with_tables(x, bart=False, **tables), **APART)
    with pytest.raises(ConfigError, match="share_encoder_decoder_embeddings is False: source and"):
        load_text_model(folder)


def test_source_ids_are_validated_against_source_vocabulary():
    config = ModelConfig(kind="encoder-decoder", vocab_size=11, source_vocab_size=13, d_model=12)
    targets = with_special_tokens(CharTokenizer("abcdefghi"), ["bos", "eos"])
    sources = CharTokenizer("abcdefghijklmn")
    model = LanguageModel(TextModel(config, {}, targets, source_tokenizer=sources), "here")
    with pytest.raises(
        ValueError, match="prompt is 'ln': it has token 13, 'n', but the model has only 13"
    ):
        model.generate("ln", 2)


# Accepted and rejected folders


def changed(tmp_path: Path, name: str, tensors: Any = dict, **keys: Any) -> Path:
    """Copy the golden with changed keys of config.json (... removes one) and tensors."""
    return model_folders.changed(GOLDEN / name, tmp_path / "changed", tensors or dict, **keys)


def head(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return stored | {"lm_head.weight": stored["shared.weight"] + 1}


def copies(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"
    return stored | dict.fromkeys(names, stored["shared.weight"])


def renamed(old: str, new: str) -> Any:
    return lambda stored: {new if name == old else name: value for name, value in stored.items()}


@pytest.mark.slow
def test_t5_output_matrix_is_scaled_embedding_table(tmp_path):
    """Checks the table in families/t5.py."""
    absent: Any = dict(scale_decoder_outputs=...)
    scale = 14**-0.5
    for keys, tensors, want in (
        (absent, None, (True, scale)),
        (absent | dict(tie_word_embeddings=...), copies, (True, scale)),
        (absent | dict(tie_word_embeddings=False), head, (False, None)),
        (dict(scale_decoder_outputs=False), None, (True, None)),
        (dict(scale_decoder_outputs=True), None, (True, scale)),
        (dict(scale_decoder_outputs=False), head, (False, None)),
        (dict(scale_decoder_outputs=True, tie_word_embeddings=False), head, (False, scale)),
    ):
        config, params = load_pretrained(changed(tmp_path, "t5", tensors, **keys))
        assert (config.tie_embeddings, config.logit_scale) == want
        assert ("output" in params["embed"]) == (not want[0])
        content = write_config(FAMILIES["t5"], config)
        assert content["tie_word_embeddings"] == want[0]
        assert content["scale_decoder_outputs"] == (want[1] is not None)
        shutil.rmtree(tmp_path / "changed")


def test_contradictory_t5_config_is_rejected(tmp_path):
    absent: Any = dict(scale_decoder_outputs=...)
    for keys, tensors, rule in (
        (absent, head, "lm_head.weight must equal shared.weight, to which config.json ties it"),
        (absent | dict(tie_word_embeddings=False), None, "tensor lm_head.weight is missing"),
        (dict(tie_word_embeddings=False), None, "tensor lm_head.weight is missing"),
    ):
        with pytest.raises(CheckpointError, match=rule):
            load_pretrained(changed(tmp_path, "t5", tensors, **keys))
        shutil.rmtree(tmp_path / "changed")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("t5", "shared.weight", "decoder.embed_tokens.weight"),
        ("marian", "model.shared.weight", "lm_head.weight"),
        ("marian", "model.shared.weight", "model.encoder.embed_tokens.weight"),
    ],
)
def test_tied_tensor_may_be_stored_only_under_copy_name(name, old, new, tmp_path):
    folder = changed(tmp_path, name, renamed(old, new))
    chex.assert_trees_all_equal(load_pretrained(folder)[1], loaded(name)[1], strict=True)


def test_mismatched_tied_tensor_copies_are_rejected(tmp_path):
    name = "encoder.embed_tokens.weight"
    folder = changed(
        tmp_path, "t5", lambda stored: copies(stored) | {name: -stored["shared.weight"]}
    )
    with pytest.raises(CheckpointError, match=f"{name} must equal shared.weight"):
        load_pretrained(folder)


def test_cross_attention_bias_is_ignored(tmp_path):
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    folder = changed(tmp_path, "t5", lambda stored: stored | {name: np.ones((8, 3), np.float32)})
    chex.assert_trees_all_equal(load_pretrained(folder)[1], loaded("t5")[1], strict=True)


TABLES = "model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_old_marian_position_tables_must_be_sinusoids(dtype, tmp_path):
    table = np.asarray(sinusoidal(jnp.arange(31), 18, layout="halves")).astype(dtype)
    folder = changed(tmp_path, "marian", lambda stored: stored | dict.fromkeys(TABLES, table))
    chex.assert_trees_all_equal(load_pretrained(folder)[1], loaded("marian")[1], strict=True)


@pytest.mark.slow
def test_other_position_tables_are_rejected(tmp_path):
    table = np.array(sinusoidal(jnp.arange(31), 18, layout="halves"))
    turns = np.asarray(sinusoidal(jnp.arange(31), 18))
    broken = table.copy()
    broken[7, 3] = np.nan
    for wrong in (turns, broken, table[:30], table[:, :17], table[0]):
        for name in TABLES:
            folder = changed(tmp_path, "marian", lambda stored: stored | {name: wrong})  # noqa: B023
            with pytest.raises(
                CheckpointError, match=f"{name} differs from the values that config.json"
            ):
                load_pretrained(folder)
            shutil.rmtree(folder)


def test_marian_without_output_head_can_be_loaded(tmp_path):
    """Saved MarianModels have no prefix and no logit bias."""

    def bare(stored):
        stored.pop("final_logits_bias")
        return {name.removeprefix("model."): value for name, value in stored.items()}

    config, params = load_pretrained(changed(tmp_path, "marian", bare))
    assert not config.logit_bias and "bias" not in params["embed"]
    want = {**loaded("marian")[1]["embed"]}
    np.testing.assert_array_equal(params["embed"]["tokens"], want["tokens"])


@pytest.mark.parametrize(
    ("name", "keys", "rule"),
    [
        ("t5", dict(is_encoder_decoder=False), "is_encoder_decoder is False: must be True"),
        ("t5", dict(feed_forward_proj="gated-tanh"), "feed_forward_proj is 'gated-tanh': must be"),
        ("t5", dict(dense_act_fn="silu"), "dense_act_fn is 'silu': must match feed_forward_proj"),
        ("t5", dict(dense_act_fn=["relu"]), "dense_act_fn is .'relu'.: must be one of"),
        ("t5", dict(is_gated_act=True), "is_gated_act is True: must match feed_forward_proj"),
        ("t5", dict(scale_decoder_outputs=1), "scale_decoder_outputs is 1: must be true or false"),
        ("t5", dict(d_kv=0), "d_kv is 0: must be an integer from 1"),
        ("t5", dict(relative_attention_num_buckets=10**9), "_buckets is 1000000000: must be at"),
        ("t5", dict(relative_attention_num_buckets=7), "attention_num_buckets is 7: must be even"),
        ("t5", dict(relative_attention_num_buckets=2), "num_buckets is 2: must be .* at least 4"),
        ("t5", dict(relative_attention_num_buckets=8, relative_attention_max_distance=4),
         "relative_attention_max_distance is 4: must exceed relative_attention_num_buckets / 2"),
        ("t5", dict(relative_attention_max_distance=2**31 - 1, relative_attention_num_buckets=256),
         r"relative_attention_bias.weight has shape \[8, 3\]: config.json requires \[256, 3\]"),
        ("t5", dict(num_decoder_layers="1"), "num_decoder_layers is '1': must be an integer"),
        ("marian", dict(decoder_attention_heads=2), "decoder_attention_heads is 2: must equal enc"),
        ("marian", dict(num_hidden_layers=7), "num_hidden_layers is 7: must equal "),
        ("marian", dict(decoder_ffn_dim=29), "decoder_ffn_dim is 29: must equal encoder_ffn_dim"),
        ("marian", dict(normalize_before=True), "normalize_before is True: must be False"),
        ("marian", dict(add_final_layer_norm=True), "add_final_layer_norm is True: must be False"),
        ("marian", dict(normalize_embedding=True), "normalize_embedding is True: must be False"),
        ("marian", dict(static_position_embeddings=False), "static_position_embeddings is False"),
        ("marian", dict(share_encoder_decoder_embeddings=False),
         "tensor model.encoder.embed_tokens.weight is missing"),
        ("marian", dict(share_encoder_decoder_embeddings=0), "must be true or false"),
        ("marian", dict(decoder_vocab_size=43), "decoder_vocab_size is 43: must equal vocab_size"),
        ("marian", dict(tie_word_embeddings=False), "tensor lm_head.weight is missing"),
        ("marian", dict(model_type="bart", share_encoder_decoder_embeddings=...,
                        decoder_vocab_size=...), "tensor model.encoder.embed_positions.weight is "),
        ("marian", dict(model_type="bart", normalize_embedding=False), "normalize_embedding is F"),
        ("marian", dict(model_type="mbart", normalize_before=False), "normalize_before is False"),
        ("marian", dict(model_type="m2m_100", d_model=2), "d_model is 2: must be at least 4"),
        ("marian", dict(model_type="m2m_100", pad_token_id=None), "pad_token_id is None: must be"),
        ("marian", dict(model_type="pegasus", add_final_layer_norm=False), "add_final_layer_norm"),
        ("marian", dict(model_type="pegasus", share_encoder_decoder_embeddings=...,
                        decoder_vocab_size=...), "tensor model.encoder.layer_norm.weight is mi"),
    ],
)  # fmt: skip
def test_unsupported_options_are_rejected_by_name(name, keys, rule, tmp_path):
    folder = changed(tmp_path, name, **keys)
    with pytest.raises((ConfigError, CheckpointError), match=rule) as error:
        load_pretrained(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("flag", [True, False])
def test_t5_encoder_loads_without_decoder(flag, tmp_path):
    def half(stored):
        return {name: value for name, value in stored.items() if not name.startswith("decoder.")}

    keys = dict(architectures=["T5EncoderModel"], is_encoder_decoder=flag)
    config, params = load_pretrained(changed(tmp_path, "t5", half, **keys))
    whole, parts, case = loaded("t5")
    assert (config.kind, config.num_layers) == ("encoder", whole.num_layers)
    chex.assert_trees_all_equal(params, {name: parts[name] for name in ("embed", "encoder")})
    given = dict(positions=case["source_positions"], method="encode")
    got, want = (
        build(own).apply({"params": stored}, case["source"], **given)
        for own, stored in ((config, params), (whole, parts))
    )
    np.testing.assert_array_equal(got, want)
    written = write_config(FAMILIES["t5"], config)
    assert written["architectures"] == ["T5EncoderModel"] and not written["is_encoder_decoder"]
    with pytest.raises(ConfigError, match=r"logit_scale is 0\.5: must be None in the family t5"):
        write_config(FAMILIES["t5"], dataclasses.replace(config, logit_scale=0.5))


def test_mt5_logits_are_unscaled():
    config = loaded("t5")[0]
    assert config.logit_scale is not None
    with pytest.raises(ConfigError, match=r"logit_scale is .*: must be None in the family mt5"):
        write_config(FAMILIES["mt5"], config)


@pytest.mark.parametrize(
    ("forward", "activation", "glu"),
    [
        ("relu", "relu", False), ("gated-gelu", "gelu_tanh", True), ("gated-silu", "silu", True),
        ("gelu", "gelu", False), ("gelu_new", "gelu_tanh", False), ("gated-relu", "relu", True),
    ],
)  # fmt: skip
def test_t5_feed_forward_keys_round_trip(forward, activation, glu):
    config = ModelConfig(
        kind="encoder-decoder", positions="t5", norm="rmsnorm", norm_eps=1e-6, use_bias=False,
        attention_scale=1.0, activation=activation, glu=glu, logit_scale=128**-0.5,
    )  # fmt: skip
    assert write_config(FAMILIES["t5"], config)["feed_forward_proj"] == forward


def test_invalid_t5_config_is_rejected():
    config = ModelConfig(
        kind="encoder-decoder", positions="t5", norm="rmsnorm", use_bias=False,
        attention_scale=1.0, activation="gelu", glu=True,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="dense_act_fn is 'gelu': must match feed_forward_proj"):
        write_config(FAMILIES["t5"], config)


@pytest.mark.slow
def test_original_transformer_config_cannot_be_saved(tmp_path):
    """Its sines and cosines are interleaved, unlike in any Marian."""
    config = ModelConfig(
        kind="encoder-decoder", vocab_size=11, d_model=6, num_heads=3, num_layers=1, d_ff=5,
        positions="sinusoidal", norm_order="post", scale_embeddings=True,
    )  # fmt: skip
    params = init_params(config, jax.random.key(0))
    message = r"positions\.layout is 'interleaved': must be 'halves' in the family marian"
    with pytest.raises(ConfigError, match=message):
        save_pretrained(tmp_path / "a", config, params)
    with pytest.raises(ConfigError, match=r"positions\.layout is 'interleaved'"):
        save_pretrained(tmp_path / "a", config, params, family="marian")
