"""What a row of a task holds, and what `convert` writes, beside `transformers`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.published_text import (
    SEQ2SEQ,
    saved,
    torch,
    torch_batch,
    trained,
    transformers,
)
from transformer_jax.cli.convert import main as convert
from transformer_jax.cli.generate import main as generate
from transformer_jax.config import TrainConfig, fine_tuning
from transformer_jax.config.tasks import Seq2SeqTask
from transformer_jax.training.batch import batch_logits, batch_scores
from transformer_jax.training.data import IGNORE
from transformer_jax.training.initial import start_model
from transformer_jax.training.loop import fit
from transformer_jax.training.tasks import load_task
from transformer_jax.training.tasks.answers import answer_sources

pytestmark = pytest.mark.usefixtures("quick_compilation")

PAIRS = [("abc", "cba"), ("ab aab", "baa ba"), ("hello", "olleh"), ("x", "x"), ("yes", "sey")]


@pytest.fixture(scope="module", params=SEQ2SEQ)
def published(request: Any, tmp_path_factory: Any) -> tuple[Path, Any, Any]:
    """A folder, its model and its tokenizer: trained until the pairs are known by heart."""
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
    """Go on from a folder with steps that change nothing that shows."""
    data = out.parent / "pairs.tsv"
    data.write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS))
    start = fine_tuning(start_model(str(folder)).config, str(folder), Seq2SeqTask(beams=1))
    return dataclasses.replace(
        start, data=str(data), val_data=str(data), out=str(out), steps=1, warmup_steps=0,
        batch_size=2, context=29, learning_rate=1e-9, min_learning_rate=0.0, eval_every=1,
    )  # fmt: skip


def test_rows_and_losses_are_those_of_transformers(published, tmp_path):
    folder, model, tokenizer = published
    config = run_config(folder, tmp_path / "run")
    start = start_model(str(folder))
    task = load_task(config, start.tokenizers)
    (rows,) = task.train.buckets
    params, given = start.params(False), torch_batch(tokenizer, PAIRS)
    order = np.argsort([len(s) + len(t) for s, t in token_lists(tokenizer)], kind="stable")
    reads = model.prepare_decoder_input_ids_from_labels(given["labels"])
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
        theirs = torch.log_softmax(model(**given).logits, -1).numpy()
    for row, number in enumerate(order):
        labels = token_lists(tokenizer)[number][1]
        for at, label in enumerate(labels):
            assert abs(logs[row, at, label] - theirs[number, at, label]) < 1e-4
    summed, count, right = np.asarray(batch_scores(task.config.model)(params, rows))
    with torch.no_grad():
        loss = float(model(**given).loss)
    assert loss < 0.1 and right == count
    assert abs(summed / count - loss) < 1e-5
    sources, targets = zip(*PAIRS, strict=True)
    for beams in (1, 3):
        assert answer_sources(config, task.tokenizers, params, sources, beams=beams) == [*targets]


def token_lists(tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    return [(tokenizer(s).input_ids, tokenizer(text_target=t).input_ids) for s, t in PAIRS]


def test_a_converted_run_writes_in_transformers_what_it_writes_here(published, tmp_path, capsys):
    folder, _, tokenizer = published
    result = fit(run_config(folder, tmp_path / "run"))
    assert result.scores["exact_match"] == 1.0, result.scores
    assert generate(["--run", str(tmp_path / "run"), "--prompt", "hello"]) == 0
    assert capsys.readouterr().out == "olleh\n"
    assert convert(["--run", str(tmp_path / "run"), "--to", str(tmp_path / "to")]) == 0
    again, info = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "to", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    own = transformers.AutoTokenizer.from_pretrained(tmp_path / "to")
    for source, target in PAIRS:
        given = own(source, return_tensors="pt")
        assert given.input_ids.tolist() == [tokenizer(source).input_ids]
        ids = again.generate(**given, max_new_tokens=17, do_sample=False, num_beams=1)[0]
        assert own.decode(ids, skip_special_tokens=True).strip() == target
    before, after = (json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "to"))
    beside = json.loads((folder / "generation_config.json").read_text())
    written = json.loads((tmp_path / "to" / "generation_config.json").read_text())
    for name in (
        "decoder_start_token_id", "eos_token_id", "pad_token_id", "forced_bos_token_id",
        "forced_eos_token_id",
    ):  # fmt: skip
        meant = beside.get(name, before.get(name))
        assert (after.get(name), written.get(name)) == (meant, meant), name
    capsys.readouterr()
    assert generate(["--model", str(tmp_path / "to"), "--prompt", "yes", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "sey\n"
