"""Decoding of targets against the full forward pass."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.__main__ import main as run_command
from transformer_jax.attention.masks import Causal, Prefix
from transformer_jax.config import ModelConfig, NgramConfig, RecurrentConfig, TrainConfig
from transformer_jax.config.tasks import LanguageTask, PrefixTask, Seq2SeqTask
from transformer_jax.decoding import beams
from transformer_jax.decoding.generation import generate
from transformer_jax.models.factory import build, init_params
from transformer_jax.tokenizers.special import special_ids, with_special_tokens
from transformer_jax.tokenizers.trained import CharTokenizer
from transformer_jax.training.loop import fit
from transformer_jax.training.tasks import answers
from transformer_jax.training.tasks.answers import Targets, answer_sources
from transformer_jax.training.tasks.task import Tokenizers

pytestmark = pytest.mark.usefixtures("quick_compilation")

SOURCES = ["a", "bcd", "dcbaa", "bb"]
SMALL = dict(d_model=12, num_heads=2, num_layers=2, max_len=13, init_std=0.5, tie_embeddings=False)


def untrained(task, model, names, seed=4):
    """Return a run of a new model with weights large enough to generate various targets."""
    tokenizer = with_special_tokens(CharTokenizer("abcd"), names)
    config = TrainConfig(task=task, model=model, context=13)
    return config, Tokenizers(tokenizer), init_params(model, jax.random.key(seed))


def likeliest(config, params, sources, prompts, written):
    """Return the likeliest token after each token of prompts and targets, by one full pass."""
    rows = [[*prompt, *target] for prompt, target in zip(prompts, written, strict=True)]
    width = min(max(map(len, rows)), 13)  # the last token that fits is generated but not read
    tokens = np.array([(row + [0] * width)[:width] for row in rows])
    kwargs = {}
    if len(prompts[0]) == 1:
        longest = max(map(len, sources))
        padded = np.array([list(s) + [0] * (longest - len(s)) for s in sources])
        valid = np.arange(longest)[None] < np.array([[len(s)] for s in sources])
        kwargs["source"] = padded
        if isinstance(config.model, ModelConfig):
            kwargs["source_positions"] = np.where(valid, np.arange(longest)[None], -1)
        else:
            kwargs["source_valid"] = valid
    if isinstance(config.task, PrefixTask) and config.task.bidirectional:
        kwargs["mask"] = Causal() | Prefix(jnp.asarray([len(prompt) for prompt in prompts]))
    logits, _ = jax.jit(build(config.model).apply)({"params": params}, tokens, **kwargs)
    return np.asarray(logits.argmax(axis=-1))


CASES = {
    "prefix": (PrefixTask(beams=1), ModelConfig(vocab_size=6, **SMALL), ["sep", "eos"]),
    "causal": (
        PrefixTask(beams=1, bidirectional=False), ModelConfig(vocab_size=6, **SMALL),
        ["sep", "eos"],
    ),
    "encoder-decoder": (
        Seq2SeqTask(beams=1), ModelConfig(kind="encoder-decoder", vocab_size=6, **SMALL),
        ["bos", "eos"],
    ),
    "recurrent": (
        Seq2SeqTask(beams=1),
        RecurrentConfig(
            vocab_size=6, source_vocab_size=6, d_embed=5, d_hidden=7, attention="additive",
            init_std=1.0,
        ),
        ["bos", "eos"],
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.long_except("causal")
@pytest.mark.parametrize("name", CASES)
def test_generated_targets_in_batches_match_full_forward(name):
    """Sources of different lengths in one batch, with a cache or a state."""
    config, tokenizers, params = untrained(*CASES[name])
    ids = special_ids(tokenizers.tokenizer)
    sources = [tokenizers.tokenizer.encode(source) for source in SOURCES]
    two_rows = "bos" in ids
    prompts = [[ids["bos"]] if two_rows else [*source, ids["sep"]] for source in sources]
    read = sources if two_rows else [np.array(prompt, np.int32) for prompt in prompts]
    begun, named = Targets(config, tokenizers, params)._decoding_arguments(read, None)
    written = generate(*begun, **named).rows()
    likely = likeliest(config, params, sources, prompts, written)
    for row, prompt, target in zip(likely, prompts, written, strict=True):
        limit = 13 if two_rows else 14 - len(prompt)  # regardless of the other rows
        predicted = row[len(prompt) - 1 :]
        assert np.array_equal(predicted[: len(target)], target)
        assert len(target) == limit or target[-1] == ids["eos"]  # the stop token is included
    assert len({tuple(target) for target in written}) > 1


ONE_ROW = RecurrentConfig(vocab_size=6, d_embed=5, d_hidden=7, cell="gru", init_std=1.0)
WITH_BEAMS = {
    **CASES,
    "rope": (
        PrefixTask(), ModelConfig(vocab_size=6, **SMALL | dict(positions="rope")), ["sep", "eos"],
    ),
    "recurrent decoder": (PrefixTask(), ONE_ROW, ["sep", "eos"]),
}  # fmt: skip
VARIOUS = {"recurrent": 3, "rope": 1}
"""Seeds of models that generate various targets."""
MANY = ["a", "bcd", "abcdabcdabcd", "dcbaa", "bb", "cadbcad", "abcdabcdabc"]


@pytest.mark.slow
@pytest.mark.long_except("recurrent decoder-None")
@pytest.mark.parametrize("num_tokens", [None, 5])
@pytest.mark.parametrize("name", WITH_BEAMS)
def test_beam_answers_do_not_depend_on_batch(name, num_tokens, monkeypatch):
    """Sources of 1 to 12 letters, with a padded last batch; two have room for 1 and 2 tokens."""
    monkeypatch.setattr(answers, "BATCH", 3)
    config, tokenizers, params = untrained(*WITH_BEAMS[name], seed=VARIOUS.get(name, 4))
    reports = []
    write = partial(answer_sources, config, tokenizers, params, beams=3, num_tokens=num_tokens)
    together = write(MANY, report=lambda *counts: reports.append(counts))
    assert together == [write([source])[0] for source in MANY]
    assert reports == [(0, 7), (3, 7), (6, 7), (7, 7)]
    assert len(set(together)) > 3
    if isinstance(config.model, ModelConfig) and config.model.kind == "decoder":
        most = [min(13 - len(source), num_tokens or 13) for source in MANY]
        sizes = [len(text) for text in together]
        assert all(size <= limit for size, limit in zip(sizes, most, strict=True))
        assert len(set(sizes)) > 2


@pytest.mark.slow
def test_sources_in_one_bucket_share_beam_search_program(monkeypatch):
    monkeypatch.setattr(answers, "BATCH", 3)
    run = untrained(
        PrefixTask(), ModelConfig(vocab_size=6, **SMALL | dict(d_model=10)), ["sep", "eos"]
    )
    before = beams._search.num_programs()
    answer_sources(*run, MANY)
    answer_sources(*run, ["d" * n for n in range(1, 13)])
    assert beams._search.num_programs() == before + 1


@pytest.mark.long
def test_ngram_model_is_trained_by_one_counting_step(tmp_path):
    """The loss matches dictionaries of counts, here for letters in a cycle."""
    (tmp_path / "text.txt").write_text("abcd" * 200)
    config = TrainConfig(
        task=LanguageTask(), model=NgramConfig(order=3), data=str(tmp_path / "text.txt"),
        out=str(tmp_path / "run"), steps=1, warmup_steps=0, sample_tokens=9, batch_size=4,
    )  # fmt: skip
    result = fit(config)
    assert len(result.config.model.nodes) == 3
    assert result.accuracy == 1.0 and result.val_loss < 0.01
    assert result.perplexity == pytest.approx(np.exp(result.val_loss))
    assert result.sample in "abcd" * 4
    again = fit(config, resume=True)
    assert (again.step, again.val_loss) == (1, result.val_loss)


@pytest.mark.long
def test_document_model_begins_and_ends_documents_as_trained(tmp_path, capsys):
    """Every document is "ab" or "bca": the first letter determines the rest and the end."""
    (tmp_path / "text.txt").write_text("ab\nbca\n" * 90)
    out = str(tmp_path / "run")
    config = TrainConfig(
        task=LanguageTask(documents="lines"), model=NgramConfig(order=4), out=out,
        data=str(tmp_path / "text.txt"), steps=1, warmup_steps=0, sample_tokens=20,
    )  # fmt: skip
    assert fit(config).sample in ("ab", "bca")
    for prompt, whole in (("a", "ab"), ("b", "bca")):
        argv = ["generate", "--model", out, "--prompt", prompt, "--temperature", "0"]
        assert run_command(argv) == 0
        assert capsys.readouterr().out == whole + "\n"
