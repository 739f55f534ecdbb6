"""Limits of config rules: the first rejected and the last accepted value of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from transformer_jax.config import (
    ConfigError,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    NgramConfig,
    RecurrentConfig,
    TrainConfig,
    WindowConfig,
)
from transformer_jax.config.experts import Experts
from transformer_jax.config.mixers import GatedDelta
from transformer_jax.config.optimizers import Muon, ScheduleFree
from transformer_jax.config.prepare import PrepareConfig
from transformer_jax.config.tasks import (
    AdditionTask,
    ClassifyTask,
    LanguageTask,
    MaskedTask,
    PreferenceTask,
    RecallTask,
    ReverseTask,
    Seq2SeqTask,
)

MODEL = ModelConfig(d_model=8, num_heads=1, num_layers=1, max_len=9)
ENCODER = replace(MODEL, kind="encoder")
STATES = replace(MODEL, mixers=("gated_delta",), gated_delta=GatedDelta())
PAIRS = replace(MODEL, kind="encoder-decoder")
TRAIN = TrainConfig(model=MODEL)
FILES = PrepareConfig(data=("a.txt",))
LORA = dict(init_from="x", tokenizer="pretrained")

BORDERS = [
    (MODEL, dict(activation="sys:version"), dict(activation="math:cos"), "activation is 'sys:ver"),
    (FILES, dict(data=()), dict(data=("a",)), "data is .*: must name at least one file"),
    (FILES, dict(val_fraction=0.0), dict(val_fraction=0.001), "val_fraction is 0.0: must be betw"),
    (FILES, dict(val_fraction=1.0), dict(val_fraction=0.999), "val_fraction is 1.0: must be betw"),
    (FILES, dict(field="", documents="jsonl"), dict(field="x", documents="jsonl"), "field is '':"),
    (FILES, dict(bpe_vocab_size=256), dict(bpe_vocab_size=257), "bpe_vocab_size is 256: must be"),
    (FILES, dict(tokenizer="byte", sample_mb=3), dict(tokenizer="word", sample_mb=3), "sample_mb"),
    (FILES, dict(word_count=2), dict(word_count=2, tokenizer="word"), "word_count is 2: needs to"),
    (FILES, dict(field="x"), dict(field="x", data=("a.txt", "b.PARQUET")), "field is 'x': needs"),
    (TRAIN, dict(dump_batch=1.0), dict(dump_batch=1.01), "dump_batch is 1.0: must be above 1"),
    (TRAIN, dict(dump_batch=float("inf")), dict(dump_batch=1e9), "dump_batch is inf: must be a fi"),
    (TRAIN, dict(seed=2**32), dict(seed=2**32 - 1), "seed is 4294967296: must be at least 0 and"),
    (TRAIN, dict(seed=-1), dict(seed=0), "seed is -1: must be at least 0 and below"),
    (TRAIN, dict(val_fraction=1.0), dict(val_fraction=0.99), "val_fraction is 1.0: must be betwe"),
    (TRAIN, dict(min_learning_rate=0.2), dict(min_learning_rate=0.001), "min_learning_rate is 0."),
    (TRAIN, dict(bpe_vocab_size=256, tokenizer="bpe"), dict(bpe_vocab_size=257, tokenizer="bpe"),
     "bpe_vocab_size is 256: must be at least 257"),
    (TRAIN, dict(context=10), dict(context=9), "context is 10: must be at most the model's"),
    (TRAIN, dict(profile="0-2"), dict(profile="1-2000"), "profile is '0-2': must be steps from 1"),
    (TRAIN, dict(profile="1-2001"), dict(profile="2-2"), "profile is '1-2001': must be steps fro"),
    (TRAIN, dict(profile="3-2"), dict(profile="2-3"), "profile is '3-2': must be steps from 1 to"),
    (TRAIN, dict(profile="1-2-3"), dict(profile="1-3"), "profile is '1-2-3': must be a first and"),
    (TRAIN, dict(profile="3"), dict(profile="3-3"), "profile is '3': must be "),
    (TRAIN, dict(profile="a-b"), dict(profile="1-2"), "profile is 'a-b': must be "),
    (TRAIN, dict(data_weights=(1.0, 0.0)), dict(data_weights=(1.0, 0.1)), "data_weights is .*: m"),
    (TRAIN, dict(log=("wandb", "wandb")), dict(log=("wandb",)), "log is .*: must be some of"),
    (TRAIN, dict(log=("tensorbord",)), dict(log=("tensorboard",)), "log is .*: must be some of"),
    (TRAIN, dict(init_from="x"), LORA, "tokenizer is 'char': must be 'pretrained' if and only"),
    (TRAIN, dict(tokenizer="pretrained"), LORA, "tokenizer is 'pretrained': must be 'pretrained'"),
    (TRAIN, dict(lora=LoraConfig(), optimizer=Muon(), **LORA), dict(lora=LoraConfig(), **LORA),
     "optimizer is 'muon': applies to kernels, but lora trains none"),
    (TRAIN, dict(lora=LoraConfig(), model=WindowConfig(), **LORA), dict(lora=LoraConfig(), **LORA),
     "lora is 'LoraConfig': is supported only by transformers, but the model is window"),
    (TRAIN, dict(lora=LoraConfig(), frozen=("embed",), **LORA), dict(lora=LoraConfig(), **LORA),
     "frozen is .*: cannot be used with lora: use lora.base"),
    (TRAIN, dict(lora=LoraConfig(), param_dtype="bfloat16", **LORA), dict(param_dtype="bfloat16"),
     "param_dtype is 'bfloat16': cannot be used with lora"),
    (TRAIN, dict(lora=LoraConfig(trained=("embed",)), task=PreferenceTask(), **LORA),
     dict(lora=LoraConfig(), task=PreferenceTask(), **LORA), "lora.trained is .*: must be .*pref"),
    (TRAIN, dict(mesh=MeshConfig(data=2), model=RecurrentConfig()), dict(mesh=MeshConfig(data=2)),
     "mesh is 'data=2': is supported only by transformers, but the model is recurrent"),
    (TRAIN, dict(mesh=MeshConfig(data=5)), dict(mesh=MeshConfig(data=3, fsdp=4)),
     "batch_size is 12: must be a multiple of 5, since mesh data=5 splits the rows"),
    (TRAIN, dict(mesh=MeshConfig(expert=2)), dict(mesh=MeshConfig(tensor=5)),
     "mesh is 'expert=2': expert must divide the number of experts in the model, but there are"),
    (TRAIN, dict(mesh=MeshConfig(expert=3), model=replace(MODEL, experts=Experts(count=4))),
     dict(mesh=MeshConfig(expert=2), model=replace(MODEL, experts=Experts(count=4))),
     "mesh is 'expert=3': expert must divide the number of experts in the model, but there are 4"),
    (TRAIN, dict(mesh=MeshConfig(context=7)), dict(mesh=MeshConfig(context=3), context=9),
     "mesh is 'context=7': context must divide the length of the rows"),
    (TRAIN, dict(mesh=MeshConfig(context=2), task=PreferenceTask(), context=8, **LORA),
     dict(mesh=MeshConfig(data=2), task=PreferenceTask(), context=8, **LORA),
     "mesh is 'context=2': context does not support the task 'preference'"),
    (TRAIN, dict(mesh=MeshConfig(context=2), context=8,
                 model=replace(MODEL, kind="encoder-decoder"), task=ReverseTask()),
     dict(mesh=MeshConfig(data=2), model=replace(MODEL, kind="encoder-decoder"),
          task=ReverseTask()),
     "mesh is 'context=2': context needs a decoder or encoder of tokens"),
    (TRAIN, dict(mesh=MeshConfig(context=3), context=9, model=STATES),
     dict(mesh=MeshConfig(data=2), context=9, model=STATES),
     "mesh is 'context=3': context does not support layers with a state, which read whole rows"),
    (TRAIN, dict(optimizer=Muon(), model=RecurrentConfig()), dict(optimizer=Muon()),
     "optimizer is 'muon': is supported only by the blocks of transformers, but the model is"),
    (TRAIN, dict(optimizer=ScheduleFree()), dict(optimizer=ScheduleFree(), schedule="constant"),
     "schedule is 'cosine': must be 'constant' for optimizer 'schedulefree'"),
    (TRAIN, dict(model=NgramConfig(), steps=2), dict(model=NgramConfig(), steps=1), "steps is 2:"),
    (TRAIN, dict(model=NgramConfig(), steps=1, ema_decay=0.5), dict(ema_decay=0.5), "ema_decay i"),
    (TRAIN, dict(model=RecurrentConfig(), loss_chunk=3), dict(loss_chunk=3), "loss_chunk is 3: n"),
    (TRAIN, dict(model=ENCODER, task=ClassifyTask(), loss_chunk=3), dict(loss_chunk=3), "loss_ch"),
    (TRAIN, dict(task=PreferenceTask(), z_loss=0.1, **LORA), dict(z_loss=0.1), "z_loss is 0.1: n"),
    (TRAIN, dict(decay_steps=3), dict(decay_steps=3, schedule="wsd"), "decay_steps is 3: needs s"),
    (replace(TRAIN, steps=5, schedule="wsd"), dict(decay_steps=6), dict(decay_steps=5),
     "decay_steps is 6: must not exceed steps, 5"),
    (ScheduleFree(), dict(beta1=0.0), dict(beta1=0.1), "beta1 is 0.0: must be above 0"),
    (AdditionTask(), dict(digits=10), dict(digits=9), "digits is 10: must be at most 9"),
    (ReverseTask(), dict(letters=27), dict(letters=26), "letters is 27: must be at most 26"),
    (RecallTask(), dict(letters=27), dict(letters=26), "letters is 27: must be at most 26"),
    (RecallTask(pairs=3, queries=1), dict(queries=4), dict(queries=3), "queries is 4: must not e"),
    (RecallTask(pairs=3, letters=4, queries=1), dict(pairs=5), dict(pairs=4, queries=4),
     "pairs is 5: must not exceed letters, 4"),
    (MaskedTask(), dict(rate=0.0), dict(rate=0.01), "rate is 0.0: must be above 0"),
    (MaskedTask(), dict(replaced=0.8, random=0.3), dict(replaced=0.75, random=0.25),
     "replaced is 0.8: must be at least 0, and"),
    (ClassifyTask(), dict(labels=("a",)), dict(labels=("a", "b")), "labels is .'a',.: must con"),
    (ReverseTask(), dict(min_length=5, max_length=3), dict(min_length=3, max_length=3), "min_leng"),
    (Seq2SeqTask(), dict(beams=0), dict(beams=1), "beams is 0: must be positive"),
    (LanguageTask(), dict(packed=False), dict(packed=False, documents="lines"), "packed is False:"),
    (TRAIN, dict(task=MaskedTask()), dict(task=MaskedTask(), model=ENCODER),
     "task is 'masked': needs an encoder"),
    (TRAIN, dict(task=Seq2SeqTask()), dict(task=Seq2SeqTask(), model=PAIRS),
     "task is 'seq2seq': needs an encoder-decoder"),
    (TRAIN, dict(task=ReverseTask(), model=PAIRS, data="x"), dict(task=ReverseTask(), model=PAIRS),
     "data is 'x': is not used: task 'reverse' makes its own"),
    (TRAIN, dict(word_count=2), dict(word_count=2, tokenizer="word"), "word_count is 2: needs tok"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "wrong", "right", "message"), BORDERS)
def test_config_rule_rejects_only_values_past_limit(config, wrong, right, message):
    replace(config, **right)
    with pytest.raises(ConfigError, match=f"^{message}"):
        replace(config, **wrong)


def test_derived_config_values_match_fields():
    assert TRAIN.warmup == 100 and replace(TRAIN, steps=999).warmup == 99
    assert replace(TRAIN, warmup_steps=0).warmup == 0
    assert replace(TRAIN, profile="3-17").profiled_steps == (3, 17)
    assert TRAIN.profiled_steps is None and TRAIN.sequence_len == 9
    assert replace(TRAIN, context=5).sequence_len == 5
    assert replace(TRAIN, model=RecurrentConfig()).sequence_len == 64
    for pooling, names in (
        (None, ("pooler", "classifier")), ("relu", ("pooler", "classifier")),
        ("transform", ("head_dense", "head_norm", "classifier")),
    ):  # fmt: skip
        model = replace(ENCODER, num_classes=2, pooler=pooling)
        assert replace(TRAIN, model=model, task=ClassifyTask()).trained_whole == names
    recurrent = RecurrentConfig(num_classes=2, bidirectional=True)
    assert replace(TRAIN, model=recurrent, task=ClassifyTask()).trained_whole == ("classifier",)
    assert TRAIN.trained_whole == ()
    mesh = MeshConfig(data=2, fsdp=3, tensor=5, expert=7, context=11)
    assert (mesh.devices, mesh.row_shards) == (2310, 42)
    assert str(mesh) == "data=2,fsdp=3,tensor=5,expert=7,context=11"
    names = ["data", "fsdp", "tensor", "expert", "context"]
    assert str(MeshConfig()) == "data=1" and [*mesh.shape] == names
    assert (
        LoraConfig(rank=4, alpha=8.0).scale == 2 == LoraConfig(rank=4, alpha=4.0, rslora=True).scale
    )
    for file, kind in (("a.JSONL", "jsonl"), ("a.ndjson", "jsonl"), ("a.parquet", "parquet"),
                       ("a.txt", "paragraphs"), ("jsonl", "paragraphs")):  # fmt: skip
        assert FILES.format_of(file) == kind
    assert replace(FILES, documents="lines").format_of("a.jsonl") == "lines"
