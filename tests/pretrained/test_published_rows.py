"""Rows of tasks and folders written by `convert`, compared with `transformers`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.support.published_text import (
    ENCODERS,
    SEQ2SEQ,
    encoder,
    saved,
    torch,
    torch_batch,
    trained,
    transformers,
)
from transformer_jax.cli.convert import main as convert
from transformer_jax.cli.generate import main as generate
from transformer_jax.config import TrainConfig, fine_tuning
from transformer_jax.config.tasks import ClassifyTask, MaskedTask, Seq2SeqTask
from transformer_jax.loading import load_run
from transformer_jax.training.batch import batch_logits, batch_scores
from transformer_jax.training.data import IGNORE
from transformer_jax.training.initial import start_model, start_params
from transformer_jax.training.loop import fit
from transformer_jax.training.tasks import Tokenizers, load_task
from transformer_jax.training.tasks.answers import answer_sources
from transformer_jax.training.tasks.classify import label_texts

pytestmark = [
    pytest.mark.slow,  # tests/training/fuzz_published.py compares rows in every run
    pytest.mark.usefixtures("quick_compilation"),
]

PAIRS = [("abc", "cba"), ("ab aab", "baa ba"), ("hello", "olleh"), ("x", "x"), ("yes", "sey")]


@pytest.fixture(scope="module", params=SEQ2SEQ)
def published(request: Any, tmp_path_factory: Any) -> tuple[Path, Any, Any]:
    """A folder, its model, and its tokenizer, trained until the pairs are memorised."""
    make_tokenizer, make_model = SEQ2SEQ[request.param]
    torch.manual_seed(3)
    tokenizer = make_tokenizer()
    model = trained(make_model(tokenizer), torch_batch(tokenizer, PAIRS))
    return (
        saved(tmp_path_factory.mktemp(request.param) / "model", model, tokenizer),
        model,
        tokenizer,
    )


def run_config(folder: Path, out: Path) -> TrainConfig:
    """Continue from a folder with steps that have no visible effect."""
    data = out.parent / "pairs.tsv"
    data.write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS))
    start = fine_tuning(start_model(str(folder)).config, str(folder), Seq2SeqTask(beams=1))
    return dataclasses.replace(
        start, data=str(data), val_data=str(data), out=str(out), steps=1, warmup_steps=0,
        batch_size=2, context=29, learning_rate=1e-9, min_learning_rate=0.0, eval_every=1,
    )  # fmt: skip


def test_training_rows_and_losses_match_transformers(published, tmp_path):
    folder, model, tokenizer = published
    config = run_config(folder, tmp_path / "run")
    start = start_model(str(folder))
    task = load_task(config, start.tokenizers)
    (rows,) = task.train.buckets
    params, encoded = start.params(False), torch_batch(tokenizer, PAIRS)
    order = np.argsort([len(s) + len(t) for s, t in token_lists(tokenizer)], kind="stable")
    reads = model.prepare_decoder_input_ids_from_labels(encoded["labels"])
    for row, number in enumerate(order):
        source, labels = token_lists(tokenizer)[number]
        assert rows.source[row][rows.source_valid[row]].tolist() == source
        assert rows.labels[row][: len(labels)].tolist() == labels
        assert (rows.labels[row][len(labels) :] == IGNORE).all()
        want = reads[number][: len(labels)].tolist()
        assert rows.tokens[row][: len(labels)].tolist() == want
    logits = np.asarray(batch_logits(task.config.model)(params, rows, None), np.float64)
    logs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    logs -= logits.max(-1, keepdims=True)
    with torch.no_grad():
        theirs = torch.log_softmax(model(**encoded).logits, -1).numpy()
    for row, number in enumerate(order):
        labels = token_lists(tokenizer)[number][1]
        for at, label in enumerate(labels):
            assert abs(logs[row, at, label] - theirs[number, at, label]) < 1e-4
    summed, count, right = np.asarray(batch_scores(task.config.model)(params, rows))
    with torch.no_grad():
        loss = float(model(**encoded).loss)
    assert loss < 0.1 and right == count
    assert abs(summed / count - loss) < 1e-5
    sources, targets = zip(*PAIRS, strict=True)
    for beams in (1, 3):
        assert answer_sources(config, task.tokenizers, params, sources, beams=beams) == [*targets]


def token_lists(tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    return [(tokenizer(s).input_ids, tokenizer(text_target=t).input_ids) for s, t in PAIRS]


def test_converted_run_generates_same_text_in_transformers(published, tmp_path, capsys):
    folder, _, tokenizer = published
    result = fit(run_config(folder, tmp_path / "run"))
    assert result.scores["exact_match"] == 1.0, result.scores
    assert generate(["--model", str(tmp_path / "run"), "--prompt", "hello"]) == 0
    assert capsys.readouterr().out == "olleh\n"
    assert convert(["--model", str(tmp_path / "run"), "--to", str(tmp_path / "to")]) == 0
    converted, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "to", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "to")
    for source, target in PAIRS:
        encoded = their_tokenizer(source, return_tensors="pt")
        assert encoded.input_ids.tolist() == [tokenizer(source).input_ids]
        ids = converted.generate(**encoded, max_new_tokens=17, do_sample=False, num_beams=1)[0]
        assert their_tokenizer.decode(ids, skip_special_tokens=True).strip() == target
    before, after = (json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "to"))
    beside = json.loads((folder / "generation_config.json").read_text())
    written = json.loads((tmp_path / "to" / "generation_config.json").read_text())
    for name in (
        "decoder_start_token_id", "eos_token_id", "pad_token_id", "forced_bos_token_id",
        "forced_eos_token_id",
    ):  # fmt: skip
        effective = beside.get(name, before.get(name))
        assert (after.get(name), written.get(name)) == (effective, effective), name
    assert written.get("bad_words_ids") == beside.get("bad_words_ids")
    capsys.readouterr()
    assert generate(["--model", str(tmp_path / "to"), "--prompt", "yes", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "sey\n"


@pytest.mark.parametrize("forced", [False, True])
def test_suppressed_tokens_stay_suppressed_in_fine_tuned_runs(forced, tmp_path, capsys):
    torch.manual_seed(7)
    make_tokenizer, make_model = SEQ2SEQ["marian"]
    tokenizer = make_tokenizer()
    model = make_model(tokenizer).eval()
    with torch.no_grad():
        model.final_logits_bias.normal_(0, 3)
        model.final_logits_bias[0, tokenizer.pad_token_id] = 23
    if forced:  # a forced token is generated even if it is suppressed
        model.generation_config.forced_bos_token_id = tokenizer.pad_token_id
    folder = saved(tmp_path / "model", model, tokenizer)
    start, config = start_model(str(folder)), run_config(folder, tmp_path / "run")
    ids = model.generate(**tokenizer("ab", return_tensors="pt"), max_new_tokens=5, num_beams=1)
    want = tokenizer.decode(ids[0], skip_special_tokens=True)
    encoded = config, start.tokenizers, start.params(False), ["ab"]
    assert want and answer_sources(*encoded, num_tokens=5) == [want]
    flags = ["--prompt", "ab", "--num-tokens", "5", "--temperature", "0"]
    assert generate(["--model", str(folder), *flags]) == 0
    assert capsys.readouterr().out == f"{want}\n"


TEXTS = ["good day", "bad day!", "so, so", "the best of all", "worst", "no. yes?"]

CLASSIFIERS = {
    "BertModel-2": ("Bert", "BertModel", 2),
    "BertForMaskedLM-2": ("Bert", "BertForMaskedLM", 2),
    "BertForPreTraining-3": ("Bert", "BertForPreTraining", 3),
    "BertForPreTraining-2": ("Bert", "BertForPreTraining", 2),
    "BertForSequenceClassification-3": ("Bert", "BertForSequenceClassification", 3),
    "RobertaModel-3": ("Roberta", "RobertaModel", 3),
    "RobertaForMaskedLM-2": ("Roberta", "RobertaForMaskedLM", 2),
    "DistilBertModel-2": ("DistilBert", "DistilBertModel", 2),
    "DistilBertForMaskedLM-3": ("DistilBert", "DistilBertForMaskedLM", 3),
}


def classifier_config(folder: Path, out: Path, count: int) -> TrainConfig:
    data = out.parent / "labels.tsv"
    names = ["up", "down", "aside"][:count]
    data.write_text("".join(f"{names[n % count]}\t{text}\n" for n, text in enumerate(TEXTS)))
    start = fine_tuning(start_model(str(folder)).config, str(folder), ClassifyTask())
    return dataclasses.replace(
        start, data=str(data), val_data=str(data), out=str(out), steps=4, warmup_steps=0,
        batch_size=3, context=31, learning_rate=3e-2, eval_every=4, sample_tokens=0,
    )  # fmt: skip


def assert_same_classes(folder: Path, config: TrainConfig, tokenizers: Any, params: Any) -> None:
    """Compare the most likely class of each text and its probability with those of a folder."""
    model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ours = label_texts(config, tokenizers, params, TEXTS)
    for text, (label, probability) in zip(TEXTS, ours, strict=True):
        with torch.no_grad():
            found = model.eval()(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1)
        assert abs(float(found[model.config.label2id[label]]) - probability) < 1e-5
        assert model.config.id2label[int(found.argmax())] == label


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_classifier_matches_transformers(case, tmp_path):
    family, kind, count = CLASSIFIERS[case]
    tokenizer = ENCODERS[family]()
    options = {} if "Sequence" not in kind else {"num_labels": 2}
    model = encoder(kind, tokenizer, **options)
    folder = saved(tmp_path / "model", model, tokenizer)
    config = classifier_config(folder, tmp_path / "run", count)
    assert fit(config).step == 4
    run = load_run(tmp_path / "run")
    task = load_task(run.run, Tokenizers(run.tokenizer))
    (bucket,) = task.train.buckets
    rows = [row[ok].tolist() for row, ok in zip(bucket.tokens, bucket.valid, strict=True)]
    assert sorted(rows) == sorted(tokenizer(text).input_ids for text in TEXTS)
    assert convert(["--model", str(tmp_path / "run"), "--to", str(tmp_path / "to")]) == 0
    content = json.loads((tmp_path / "to" / "config.json").read_text())
    assert content["architectures"] == [f"{family}ForSequenceClassification"]
    labels = sorted(["up", "down", "aside"][:count])
    assert content["id2label"] == {str(i): label for i, label in enumerate(labels)}
    assert content["label2id"] == {label: i for i, label in enumerate(labels)}
    assert_same_classes(tmp_path / "to", run.run, task.tokenizers, run.params)
    converted = start_model(str(tmp_path / "to"))
    assert converted.labels == tuple(labels)


@pytest.mark.parametrize("family", ENCODERS)
def test_classification_head_with_same_classes_is_reused_in_order(family, tmp_path):
    tokenizer, names = ENCODERS[family](), ["up", "aside", "down"]
    model = encoder(
        f"{family}ForSequenceClassification", tokenizer,
        id2label=dict(enumerate(names)), label2id={name: i for i, name in enumerate(names)},
    )  # fmt: skip
    folder = saved(tmp_path / "model", model, tokenizer)
    config, start = classifier_config(folder, tmp_path / "run", 3), start_model(str(folder))
    task = load_task(config, start.tokenizers)
    assert task.config.task.labels == ("aside", "down", "up") and start.labels == (*names,)
    params, changes = start_params(task.config, start, start.params(False), jax.random.key(0))
    assert changes == []
    assert_same_classes(folder, task.config, task.tokenizers, params)
    two = classifier_config(folder, tmp_path / "run", 2)
    task = load_task(two, start.tokenizers)
    params, changes = start_params(task.config, start, start.params(False), jax.random.key(0))
    assert changes == ["new parameters: classifier/bias, classifier/kernel"]
    assert params["classifier"]["kernel"].shape == (16, 2)


@pytest.mark.parametrize(
    "kind", ["BertModel", "BertForPreTraining", "RobertaForMaskedLM", "DistilBertForMaskedLM"]
)
def test_masked_rows_have_special_tokens_around_them(kind, tmp_path, capsys):
    family = next(name for name in ENCODERS if kind.startswith(name))
    tokenizer = ENCODERS[family]()
    folder = saved(tmp_path / "model", encoder(kind, tokenizer), tokenizer)
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 12 + f"{tokenizer.sep_token} a" * 9)
    start = start_model(str(folder))
    config = dataclasses.replace(
        fine_tuning(start.config, str(folder), MaskedTask(rate=0.5)), steps=2, batch_size=3,
        data=str(tmp_path / "text.txt"), val_data=str(tmp_path / "text.txt"), context=13,
        eval_every=2, out=str(tmp_path / "run"), warmup_steps=0,
    )  # fmt: skip
    task = load_task(config, start.tokenizers)
    first, *_, last = tokenizer("a").input_ids
    for batch in (task.inputs(0), *task.evaluation()):
        real = batch.tokens.any(-1)
        assert (batch.tokens[..., 0][real] == first).all()
        assert (batch.tokens[..., -1][real] == last).all()
        assert batch.tokens.shape[-1] == 13 and (batch.labels[..., [0, -1]] == IGNORE).all()
        hidden = batch.labels[batch.labels != IGNORE]
        assert len(hidden) and not np.isin(hidden, [first, last]).any()
    fit(config)
    assert convert(["--model", str(tmp_path / "run"), "--to", str(tmp_path / "to")]) == 0
    model, info = transformers.AutoModelForMaskedLM.from_pretrained(
        tmp_path / "to", output_loading_info=True
    )
    assert not info["missing_keys"], info
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "to")
    encoded = their_tokenizer(f"to be {their_tokenizer.mask_token} not", return_tensors="pt")
    with torch.no_grad():
        best = model.eval()(**encoded).logits[0].argmax(-1)
    ids = torch.where(
        encoded.input_ids[0] == their_tokenizer.mask_token_id, best, encoded.input_ids[0]
    )
    capsys.readouterr()
    prompt = f"to be {their_tokenizer.mask_token} not"
    assert generate(["--model", str(tmp_path / "run"), "--prompt", prompt]) == 0
    want = their_tokenizer.decode(ids, skip_special_tokens=True).replace("\n", "\\n")
    assert capsys.readouterr().out.splitlines()[0].strip() == want.strip()
