"""Compare models before the transformer on a small text, and check that the terms are equal."""

from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest

from reproduce import before_transformers
from reproduce.before_transformers import (
    HEADINGS,
    LEARNING_RATES,
    SEARCHED,
    equal_models,
    main,
    markdown_table,
)
from transformer_jax import num_params

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = ["--steps", "3", "--batch-size", "5", "--context", "7", "--d-model", "8"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Return a file of 397 characters of 11 kinds, each drawn with the same probability."""
    rng = np.random.default_rng(20_261_123)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(rng.choice(list("abcdefghijk"), 397)))
    return path


@pytest.mark.long
@pytest.mark.parametrize("vocab_size", [11, 65, 211])
def test_every_model_has_the_decoders_parameters_within_three_percent(vocab_size):
    """Count parameters of every model for vocabularies of different size."""
    models = equal_models(vocab_size, 64, 61)
    counts = {name: num_params(model) for name, model in models.items()}
    assert counts.keys() == LEARNING_RATES.keys()
    for count in counts.values():
        assert abs(count / counts["decoder"] - 1) <= 0.03, counts


@pytest.fixture(scope="module")
def table(text, tmp_path_factory):
    """Run the command once, and return the lines that it prints and the runs of its JSON file."""
    file = tmp_path_factory.mktemp("figures") / "figures.json"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(["--data", str(text), "--json", str(file), "--models", "window", "rnn", *SMALL])
    return printed.getvalue().splitlines(), json.loads(file.read_text())["runs"]


@pytest.mark.long
def test_every_model_reads_equal_tokens_and_has_its_row(table):
    """Check tokens, rows, units, and the loss of a text that nobody can predict."""
    lines, runs = table
    assert [run["model"] for run in runs[2:]] == ["window", "rnn"]
    assert [run["tokens"] for run in runs] == [357] * 2 + [3 * 5 * 7] * 2
    for run in runs:
        assert run["bits"] * math.log(2) == pytest.approx(run["nats"])
        assert math.log(run["perplexity"]) == pytest.approx(run["nats"])
        assert math.log(11) - 0.2 < run["nats"] < math.log(11) + 1.0, run["model"]
    assert len(lines) == 2 + len(runs)
    assert all(line.count("|") == len(HEADINGS) + 1 for line in lines)


@pytest.mark.slow
def test_counted_ngrams_are_those_of_the_training_part(table, text):
    """Count distinct n-grams with sets; those with signs of the beginning are n-grams too."""
    _, runs = table
    for run, order in zip(runs, (5, 6), strict=False):
        training = ["<s>"] * (order - 1) + list(text.read_text()[:357])
        grams = {
            tuple(training[i : i + n])
            for n in range(1, order + 1)
            for i in range(len(training) - n + 1)
        }
        assert run["counted"] and run["parameters"] == len(grams)


@pytest.mark.slow
def test_the_search_never_reads_the_held_out_part(text, monkeypatch):
    """Look at every text that the search would train on, instead of training."""
    read = []

    def look(name, config):
        read.append((name, config.learning_rate, Path(config.data).read_text()))
        return {"nats": 0.0}

    monkeypatch.setattr(before_transformers, "run", look)
    main(["--data", str(text), "--search", *SMALL])
    whole = text.read_text()
    assert {name: 0 for name, *_ in read}.keys() == LEARNING_RATES.keys()
    assert len({(name, rate) for name, rate, _ in read}) == len(read) == 5 * len(SEARCHED)
    assert {part for *_, part in read} == {whole[:357]}


def test_a_table_in_markdown_has_its_headings_first():
    """Write two columns and one row."""
    table = markdown_table(("model", "nats"), [["rnn", "1.5"]])
    assert table == "| model | nats |\n| --- | --: |\n| rnn | 1.5 |"
