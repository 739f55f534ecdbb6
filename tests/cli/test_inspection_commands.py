"""Commands that inspect a model: output, pictures and error messages."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace

import numpy as np
import pytest

from tests.text.models import CONFIG, TURNS, chat, classes, masked, model_of, pairs, plain, run_of
from transformer_jax.__main__ import main
from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.cli import command
from transformer_jax.config import TrainConfig
from transformer_jax.config.tasks import Seq2SeqTask
from transformer_jax.interpret import zero
from transformer_jax.text import language_model
from transformer_jax.tokenizers.trained import BPETokenizer, WordTokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")

MODELS = {"plain": plain, "pairs": pairs, "masks": masked, "classes": classes, "chat": chat}


@pytest.fixture
def invoke(monkeypatch, capsys):
    """Run a command with --model from MODELS; return its status, stdout and stderr."""
    monkeypatch.setattr(language_model, "load", lambda name, **_: MODELS[name]())
    monkeypatch.setattr("transformer_jax.__main__.keep_programs", lambda: None)

    def run(*argv: str):
        status = main(list(argv))
        return (status, *capsys.readouterr())

    return run


@pytest.mark.slow
def test_translation_attention_is_drawn(invoke, tmp_path):
    target = pairs().generate("bad")
    out = tmp_path / "map.svg"
    status, printed, _ = invoke(
        "inspect", "--what", "attention", "--model", "pairs", "--prompt", "bad", "--out", str(out)
    )
    assert (status, printed) == (
        0,
        f"bad -> {target}\ndrawn: {out}\n",
    ) and "<svg" in out.read_text()
    narrow = "--target", "feed", "--part", "cross", "--layer", "1", "--head", "0"
    base = "inspect", "--what", "attention", "--model", "pairs", "--prompt", "bad", *narrow
    assert invoke(*base, "--out", f"{tmp_path}/map.png")[0] == 0


def test_tokens_command_prints_pieces_and_merges(invoke, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("sing sing singing " * 9)
    status, printed, _ = invoke(
        "tokens", "--data", str(text), "--tokenizer", "bpe", "--bpe-vocab-size", "259",
        "--prompt", "sings in",
    )  # fmt: skip
    assert status == 0
    made = BPETokenizer.train(text.read_text(), 259)
    lines = [line.split(maxsplit=1) for line in printed.partition("\n\n")[0].splitlines()[1:]]
    assert [int(i) for i, _ in lines] == made.encode("sings in").tolist()
    assert "".join(piece for _, piece in lines) == "sings␣in"
    steps = printed.partition("merges:\n")[2].split("\n\n")[0].splitlines()
    assert steps[0].split() == [*"sings"] and len(steps[-1].split()) < 5
    assert {line.replace(" ", "") for line in steps} == {"sings"}
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.write_config(TrainConfig())
    folder.write_tokenizer(WordTokenizer(("to", "be")))
    shown = invoke("tokens", "--model", str(folder.path), "--prompt", "to zz\nbe")[1].splitlines()
    assert shown == [
        "WordTokenizer(4 tokens): 4 tokens in the text", "2  to",
        "0  <unk>  zz: not among the words of the training text", "1  \\n", "3  be",
    ]  # fmt: skip


def test_nearest_command_lists_words_with_cosines(invoke):
    status, printed, _ = invoke("nearest", "--model", "plain", "--word", "c", "--count", "3")
    wanted = plain().inspect.nearest("c", count=3)
    assert status == 0
    assert printed == "".join(f"{cosine:7.4f}  {text}\n" for text, cosine in wanted)
    printed = invoke(
        "nearest", "--model", "plain", "--word", "c", "--minus", "a", "--plus", "e", "--plus", "f"
    )[1]
    first = plain().inspect.nearest("c", minus="a", plus=["e", "f"])[0]
    assert printed.startswith(f"{first[1]:7.4f}  {first[0]}\n")


def test_load_float32_flag_affects_only_published_models(monkeypatch, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(language_model, "load_run", lambda *_, **__: plain().model)
    assert command.ModelOptions(model=str(tmp_path)).load_float32().config == CONFIG
    requested = []
    monkeypatch.setattr(
        language_model,
        "load_text_model",
        lambda name, **named: requested.append(named) or plain().model,
    )
    command.ModelOptions(model="ORG/NAME").load_float32()
    assert requested == [dict(dtype="float32", max_len=None)]


def test_run_options_are_rejected_for_published_models(tmp_path, capsys):
    (tmp_path / "lock").touch()  # marks a run without checkpoints
    for argv, message in (
        (("--model", str(tmp_path)), f"{tmp_path} is not a run"),
        (("--model", "x", "--checkpoint", "best"),
         "checkpoint is 'best': 'x' is not a run; only a run has one"),
        (("--model", "x", "--init-from", "y"), "init_from is 'y': 'x' is not a run"),
    ):  # fmt: skip
        assert main(["nearest", "--word", "a", *argv]) == 2
        assert capsys.readouterr().err.startswith(f"nearest: {message}")


@pytest.mark.slow
def test_masked_prompts_print_candidates_and_pairs_print_best_output(invoke, tmp_path):
    found = masked().candidates("b_d", count=2)[0]
    printed = invoke("generate", "--model", "masks", "--prompt", "b_d", "--samples", "2")[1]
    listed = "  ".join(f"{text} {p:.3f}" for text, p in found)
    assert printed == f"{masked().generate('b_d')}\n  {listed}\n"
    (tmp_path / "lines").write_text("b_d\nf_\n")  # one output line per input line
    printed = invoke("generate", "--model", "masks", "--prompts", str(tmp_path / "lines"))[1]
    assert printed.splitlines() == masked().generate(["b_d", "f_"])
    best = pairs().search("bad", 4, beams=3, results=2)
    base = "generate", "--model", "pairs", "--prompt", "bad", "--num-tokens", "4", "--beams", "3"
    printed = invoke(*base, "--samples", "2")[1]
    assert printed == "".join(f"--- score {score:.4f}\n{text}\n" for score, text in best)
    assert invoke(*base)[1] == f"{pairs().generate('bad', 4, beams=3)}\n" == f"{best[0][1]}\n"


@pytest.mark.slow
def test_evaluate_command_prints_perplexity_or_class_for_prompt(invoke):
    printed = invoke("evaluate", "--model", "plain", "--prompt", "badcab", "--json")[1]
    found, score = json.loads(printed), plain().score("badcab")
    assert found["perplexity"] == pytest.approx(score.perplexity)
    assert (found["tokens"], found["nats"]) == (5, pytest.approx(score.nats))
    assert found["nats_per_token"] == pytest.approx(np.mean(score.token_nats))
    printed = invoke("evaluate", "--model", "pairs", "--prompt", "bad", "--target", "feed")[1]
    assert float(re.search(r"^perplexity +(\S+)$", printed, re.M)[1]) == pytest.approx(
        pairs().score(("bad", "feed")).perplexity, rel=1e-5
    )
    printed = invoke("evaluate", "--model", "chat", "--prompt", "bad", "--target", "feed")[1]
    assert f"nats            {chat().score(TURNS).nats:.6g}\n" in printed
    label, p = classes().classify("bad")
    printed = invoke("evaluate", "--model", "classes", "--prompt", "bad")[1]
    assert printed == f"label        {label}\nprobability  {p:.6g}\n"


@pytest.mark.slow
def test_evaluate_command_accepts_windows_and_questions(invoke, tmp_path):
    text, questions = tmp_path / "text.txt", tmp_path / "questions.jsonl"
    text.write_text("badcabfeed" * 3)
    base = "evaluate", "--model", "plain", "--text", str(text), "--window", "7", "--stride", "3"
    status, printed, _ = invoke(*base, "--batch-size", "2", "--json")
    score = plain().score(text.read_text(), window=7, stride=3, batch_size=2)
    found = json.loads(printed)
    assert (status, found["tokens"], found["nats"]) == (0, 29, pytest.approx(score.nats))
    assert found["perplexity"] == pytest.approx(score.perplexity)
    assert found["bits_per_byte"] == pytest.approx(score.bits_per_byte)
    error = invoke(*base[:-1], "0")[2]
    assert error == "evaluate: stride is 0: must be an integer of at least 1\n"
    status, printed, error = invoke("evaluate", "--model", "masks", "--text", str(text))
    assert (status, printed) == (2, "") and "text.txt': a run for task 'masked' fills m" in error
    requested = [{"context": "bad", "choices": ["c", "feed"], "answer": n} for n in (0, 1, 1)]
    questions.write_text("\n".join(map(json.dumps, requested)))
    printed = invoke("evaluate", "--model", "plain", "--choices", str(questions))[1]
    judged = plain().multiple_choice(questions)
    assert printed.split() == [
        "questions", "3", "accuracy", f"{judged.accuracy:.6g}",
        "accuracy_per_character", f"{judged.accuracy_per_character:.6g}",
        "accuracy_per_byte", f"{judged.accuracy_per_byte:.6g}",
    ]  # fmt: skip
    questions.write_text('{"context": "a", "choices": ["b", "c"], "answer": 2}')
    status, printed, error = invoke("evaluate", "--model", "plain", "--choices", str(questions))
    rule = "line 1: answer is 2: must be an index from 0 to 1"
    assert (status, printed, error) == (2, "", f"evaluate: {questions}, {rule}\n")


@pytest.mark.slow
def test_evaluate_command_zeroes_heads_and_rejects_invalid_places(invoke, tmp_path):
    data, questions = tmp_path / "data.txt", tmp_path / "questions.jsonl"
    data.write_text("badcabfeedface" * 3)
    questions.write_text(json.dumps({"context": "bad", "choices": ["c", "feed"], "answer": 1}))
    silent = zero("block_*/attention/heads", heads=(0, 1))
    flags = "--zero", "block_*/attention/heads", "--heads", "0", "1"
    of_plain = "evaluate", "--model", "plain"
    nats = plain().edited(silent).score("badcab").nats
    printed = invoke(*of_plain, "--prompt", "badcab", *flags, "--json")[1]
    assert json.loads(printed)["nats"] == pytest.approx(nats)
    printed = invoke(*of_plain, "--text", str(data), *flags, "--json")[1]
    score = plain().edited(silent).score(data.read_text())
    assert json.loads(printed)["nats"] == pytest.approx(score.nats)
    printed = invoke("evaluate", "--model", "classes", "--prompt", "bad", *flags, "--json")[1]
    assert json.loads(printed)["probability"] == pytest.approx(
        classes().edited(silent).classify("bad")[1]
    )
    printed = invoke(*of_plain, "--choices", str(questions), *flags, "--json")[1]
    judged = plain().edited(silent).multiple_choice(questions)
    assert json.loads(printed)["accuracy"] == judged.accuracy
    data.write_text("badcabfeedface" * 9)
    printed = invoke("evaluate", "--model", "masks", "--data", str(data), *flags, "--json")[1]
    found = masked().edited(silent).evaluate(data)
    assert json.loads(printed) == pytest.approx(found)
    for wrong, message in (
        (("--heads", "0"), r"heads is \[0\]: also pass zero"),
        (("--zero", "block_0/head"), "no place is named 'block_0/head': .*did you mean"),
        (
            ("--zero", "block_0/attention/heads", "--heads", "2"),
            r"heads is \[2\]: must be from 0 to 1",
        ),
    ):
        status, printed, error = invoke(*of_plain, "--prompt", "badcab", *wrong)
        assert (status, printed) == (2, "") and re.fullmatch(f"evaluate: {message}.*\n", error)


@pytest.mark.parametrize(
    ("argv", "rule"),
    [
        ("plot plain --out no/a.png", "out is 'no/a.png': must be a file in an existing folder"),
        ("plot plain --out a", "out is 'a': must end in .png or .svg or .pdf"),
        ("inspect --model plain --prompt a --target b", "target is 'b': 'here' continues text"),
        ("inspect --model classes --prompt a", "lens: a run for task 'classify' predicts the"),
        ("tokens --prompt a", "pass exactly one of model and data"),
        ("tokens --model x", "--prompt TEXT is required"),
        ("tokens --model x --tokenizer bpe --prompt a", "tokenizer is 'bpe': needs data"),
        ("tokens --data x --prompt a", "data is 'x': no such file or folder"),
        ("tokens --data x --bpe-vocab-size 300 --prompt a",
         "bpe_vocab_size is 300: needs tokenizer bpe, not char"),
        ("tokens --data x --tokenizer word --bpe-vocab-size 300 --prompt a",
         "bpe_vocab_size is 300: needs tokenizer bpe, not word"),
        ("nearest --model plain --word a --count 0",
         "count is 0: must be an integer of at least 1"),
        ("nearest --model plain --word bad",
         "word is 'bad': must be one token, not 3 ('b', 'a', 'd')"),
        ("evaluate --model plain --choices nowhere",
         "choices is 'nowhere': cannot be read (No such"),
        ("evaluate --model masks --text /dev/null", "text is '/dev/null': the file is empty"),
        ("evaluate --model masks --prompt a", "score: a masked model does not define the"),
    ],
)  # fmt: skip
def test_invalid_flags_raise_one_line_error(invoke, argv, rule):
    status, printed, error = invoke(*argv.split())
    assert status == 2 and not printed
    assert error.startswith(f"{argv.split()[0]}: {rule}") and error.count("\n") == 1


@pytest.mark.slow
def test_inspect_command_prints_summary_and_draws_picture(invoke, tmp_path):
    base = "inspect", "--model", "plain", "--prompt", "bad"
    page, seen = tmp_path / "lens.html", plain().inspect.lens("bad")
    status, printed, _ = invoke(*base, "--out", str(page))
    assert (status, printed) == (0, f"{seen.summary()}\ndrawn: {page}\n")
    assert page.read_text() == seen.html() and "<html" in page.read_text()
    picture = tmp_path / "patch.svg"
    requested = "--what", "patch", "--other", "cab", "--answer", "d", "--other-answer", "b"
    status, printed, _ = invoke(*base, *requested, "--out", str(picture))
    found = plain().inspect.patch("bad", "cab", answer="d", other_answer="b")
    assert (status, printed) == (0, f"{found.summary()}\ndrawn: {picture}\n")
    assert "<svg" in picture.read_text()
    target = pairs().generate("bad", 8)  # half of max_len, so that it can be read again
    printed = invoke("inspect", "--model", "pairs", "--prompt", "bad", "--out", str(page))[1]
    assert printed.startswith(
        f"bad -> {target}\n{pairs().inspect.lens(('bad', target)).summary()}\n"
    )


@pytest.mark.slow
def test_unknown_words_in_every_prompt_are_reported(invoke, tmp_path, monkeypatch):
    words = WordTokenizer(("to", "be", "or"))
    own = model_of(replace(CONFIG, vocab_size=5), words)
    monkeypatch.setitem(MODELS, "words", lambda: own)
    base = "--model", "words", "--prompt", "to bee"
    rule = "they are not among the words of the training text and are read as <unk>"
    out = (
        "--what", "patch", "--other", "be see or", "--answer", "to", "--other-answer", "be",
        "--out", str(tmp_path / "a.svg"),
    )  # fmt: skip
    filters = [*warnings.filters]
    status, _, error = invoke("inspect", "--model", "words", "--prompt", "to bee or", *out)
    assert (status, error) == (0, f"inspect: unknown words: 2 ('bee', 'see'): {rule}\n")
    assert warnings.filters == filters
    own = run_of(Seq2SeqTask(beams=1), "encoder-decoder", ("bos", "eos"), base=words)
    monkeypatch.setitem(MODELS, "words", lambda: own)
    status, _, error = invoke("evaluate", *base, "--target", "or sea")
    lines = [f"evaluate: unknown words: 1 ('{word}'): {rule}" for word in ("bee", "sea")]
    assert (status, error.splitlines()) == (0, lines)
