"""Commands call a model as their flags say and print what it returns; the model is a recorder."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import transformer_jax as tj
from transformer_jax.cli import attention, evaluate, export, generate, inside, nearest
from transformer_jax.config.tasks import DigitsTask, Seq2SeqTask
from transformer_jax.decoding.samplers import MinP, Sample, Temperature, TopK, TopP, Typical
from transformer_jax.tokenizers.special import with_special_tokens
from transformer_jax.tokenizers.trained import CharTokenizer
from transformer_jax.training.tasks.task import Tokenizers
from transformer_jax.use import evaluation, language_model
from transformer_jax.use.scores import Score

CONFIG = tj.ModelConfig(vocab_size=29, d_model=4, num_heads=1, num_layers=1, max_len=20)
ANSWERS = {
    "generate": "!x", "chat": "!y", "read": np.arange(5), "read_messages": np.arange(7),
    "room": 9, "search": [(-1.25, " a"), (-2.0, "b")], "classify": ("good", 0.75),
    "candidates": [[("a", 0.5), (" b", 0.25)], [("c", 1.0)]], "instead": "it says labels",
    "multiple_choice": SimpleNamespace(
        accuracy=0.5, accuracy_per_character=0.25, accuracy_per_byte=0.75
    ),
    "nearest": [("king", 0.98765), (" man", -0.5)],
}  # fmt: skip


class Recorder:
    """A model whose methods return ANSWERS; a list of texts gets a list."""

    def __init__(self, kind="text", task=None, **changes):
        tokenizer = with_special_tokens(CharTokenizer(" !abcdefghijklmnopqrstuvwxyz"), ["eos"])
        self.kind, self.task, self.name, self.masks = kind, task, "the model", ("[MASK]",)
        self.tokenizers, self.tokenizer = Tokenizers(tokenizer), tokenizer
        self.config, self.params, self.calls = CONFIG, {"p": 1}, []
        self.model = SimpleNamespace(
            tokenizer=tokenizer, config=CONFIG, processors=(tj.Ban(3),), stop_ids=(28,),
            run="a run", params=self.params, begin_id=None,
        )  # fmt: skip
        self.answers = ANSWERS | changes

    def with_languages(self, *names):
        self.calls.append(("with_languages", names, {}))
        return self

    def __getattr__(self, name):
        if name.startswith("__") or name not in self.answers:
            raise AttributeError(name)

        def call(*given, **named):
            if name not in ("read", "read_messages", "room", "instead"):
                if "key" in named:
                    named["key"] = jax.random.key_data(named["key"]).tolist()[-1]
                self.calls.append((name, given, named))
            found = self.answers[name]
            if named.get("stream") or (
                given and isinstance(given[0], list) and name not in ("search", "score")
            ):
                count = 2 if named.get("stream") else len(given[0])
                return [found] * count if name != "multiple_choice" else found
            return [found] * named["samples"] if "samples" in named else found

        return call


@pytest.fixture
def said(monkeypatch, capsys):
    """Run a command on a model; return its output and what the model was asked."""

    def run(main, model, *argv, status=0):
        loaded = []

        def load(name, **given):
            loaded.append((name, given))
            return model

        monkeypatch.setattr(language_model, "load", load)
        assert main([str(word) for word in argv]) == status, capsys.readouterr()
        asked, model.calls[:] = list(model.calls), []
        run.loaded = loaded
        out, run.errors = capsys.readouterr()
        return out, asked

    return run


PLAIN = dict(cache_dtype=None, processors=(), sampler=Sample(Temperature(0.8)), key=0, stop=())


def test_texts_are_written_as_the_flags_say(said, tmp_path):
    run = lambda model, *argv: said(generate.main, model, "--model", "m", *argv)  # noqa: E731
    out, asked = run(Recorder(), "--prompt", "ab")
    assert (out, asked) == ("ab!x!x\n", [("generate", ("ab", None), {"stream": True} | PLAIN)])
    flags = (
        "--temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --typical-p 0.7 --tokens 4 --seed 7 "
        "--repetition-penalty 1.2 --presence-penalty 0.3 --frequency-penalty 0.4 --stop X --stop Y "
        "--no-repeat-ngram 2 --ban ab --force c --cache-dtype int8 --dtype bfloat16 --weights int4 "
        "--max-len 11 --samples 2 --prompt a --regex a+"
    )
    given = dict(
        cache_dtype="int8", key=7, stop=("X", "Y"), samples=2, regex="a+",
        processors=(
            tj.RepetitionPenalty(1.2), tj.PresencePenalty(0.3), tj.FrequencyPenalty(0.4),
            tj.NoRepeatNGram(2), tj.Ban(2, 3), tj.Force(4),
        ),
        sampler=Sample(Temperature(0.5), TopK(3), TopP(0.9), MinP(0.1), Typical(0.7)),
    )  # fmt: skip
    out, asked = run(Recorder(), *flags.split())
    assert (out, asked) == ("--- 1\na!x\n--- 2\na!x\n", [("generate", ("a", 4), given)])
    loaded = dict(dtype="bfloat16", max_len=11, weights="int4")
    assert said.loaded == [("m", loaded)]
    file = tmp_path / "lines"
    file.write_text("ab\n\nc\n")
    out, asked = run(Recorder(), "--prompts", file, "--slots", "3")
    assert out == "--- 1\nab!x\n--- 2\nc!x\n"
    assert asked == [("generate", (["ab", "c"], 9), {"slots": 3} | PLAIN)]  # what fits
    out, asked = run(Recorder(), "--prompts", file, "--tokens", "2")
    assert asked == [("generate", (["ab", "c"], 2), {"slots": 8} | PLAIN)]
    for kind, more in (("text", ("--chat",)), ("chat", ())):
        out, asked = run(Recorder(kind), "--prompt", "hi", *more)
        assert (out, asked) == ("!y!y\n", [("chat", ("hi", None), {"stream": True} | PLAIN)])
    out, asked = run(Recorder("targets"), "--prompt", "ab", "--languages", "x,y", "--samples", 2)
    assert out == "--- 1\n!x\n--- 2\n!x\n"
    assert asked == [
        ("with_languages", ("x", "y"), {}), ("generate", ("ab", None), {"samples": 2} | PLAIN)
    ]  # fmt: skip
    grammar, schema = tmp_path / "g", tmp_path / "s"
    grammar.write_text('start: "a"')
    schema.write_text('{"maximum": 1.50}')
    ((_, _, named),) = run(Recorder(), "--prompt", "a", "--grammar", grammar)[1]
    assert named == {"stream": True, "grammar": 'start: "a"'} | PLAIN
    ((_, _, named),) = run(Recorder(), "--prompt", "a", "--schema", schema)[1]
    assert named.keys() == PLAIN.keys() | {"stream", "schema"}
    assert str(named["schema"]["maximum"]) == "1.50"


def test_beams_answers_and_masks_are_printed(said, tmp_path):
    run = lambda model, *argv: said(generate.main, model, "--model", "m", *argv)  # noqa: E731
    search = dict(beams=3, results=2, length_penalty=0.5, cache_dtype=None, processors=())
    out, asked = run(
        Recorder(), "--prompt", "ab", "--beams", 3, "--samples", 2, "--length-penalty", 0.5
    )
    assert out == "--- score -1.2500\nab a\n--- score -2.0000\nabb\n"
    assert asked == [("search", ("ab", 9), search)]
    out, asked = run(Recorder(), "--prompt", "ab", "--beams", 3, "--chat", "--tokens", 4)
    assert out == "--- score -1.2500\na\n--- score -2.0000\nb\n"
    ((name, (read, count), named),) = asked
    assert (name, list(read), count) == ("search", [*range(7)], 4)
    assert named == search | dict(results=1, length_penalty=None)
    out, asked = run(Recorder("targets"), "--prompt", "ab", "--beams", 3)
    assert asked == [("search", ("ab", None), search | dict(results=1, length_penalty=None))]
    assert out.splitlines()[1] == " a"

    pairs = Recorder("targets", Seq2SeqTask(beams=2))
    file = tmp_path / "lines"
    file.write_text("ab\nc\n")
    assert run(pairs, "--prompts", file) == (
        "!x\n!x\n", [("generate", (["ab", "c"], None), {"beams": 2})]
    )  # fmt: skip
    out, asked = run(pairs, "--prompt", "ab", "--beams", 4, "--tokens", 3)
    assert (out, asked) == ("!x\n", [("generate", (["ab"], 3), {"beams": 4})])
    out, asked = run(pairs, "--prompt", "ab", "--beams", 4, "--samples", 2)
    wanted = dict(beams=4, results=2, length_penalty=None)
    assert asked == [("search", ("ab", None), wanted)]
    assert out == "--- score -1.2500\n a\n--- score -2.0000\nb\n"
    labels = Recorder("labels")
    assert run(labels, "--prompt", "ab") == ("good 0.750\n", [("classify", (["ab"],), {})])
    masks = Recorder("masks", generate="a\rb")
    out, asked = run(masks, "--prompt", "a[MASK]", "--samples", 3)
    assert out == "a\rb\n  a 0.500  ␣b 0.250\n  c 1.000\n"
    assert asked == [
        ("generate", (["a[MASK]"],), {}), ("candidates", ("a[MASK]",), {"count": 3})
    ]  # fmt: skip
    assert run(masks, "--prompts", file)[0] == "a\\rb\n" * 2
    assert run(masks, "--prompt", "_")[1][1] == ("candidates", ("_",), {"count": 5})


def test_signals_and_looked_up_texts_are_printed(said, monkeypatch, tmp_path):
    from transformer_jax.text import completion
    from transformer_jax.training.tasks import continuous, signals
    from transformer_jax.use import writing

    task, model = DigitsTask(), Recorder("signals", DigitsTask())
    read = lambda *given, **named: (given, named)  # noqa: E731
    monkeypatch.setattr(signals, "read_signals", read)
    seen = []
    monkeypatch.setattr(
        continuous, "answer_signals", lambda *given: seen.append(given) or ["three", "one"]
    )
    out, _ = said(generate.main, model, "--model", "m", "--prompts", "f.npz")
    assert out == "three\none\n"
    file = ((task, "f.npz"), {"targets": False})
    assert seen == [("a run", model.tokenizers, model.params, file)]

    model, made = Recorder(), []
    counts = SimpleNamespace(
        accepted=np.array([3]), proposed=np.array([8]), calls=5, lengths=np.array([9])
    )
    look_up = lambda *given: made.append(given) or (" ab", counts)  # noqa: E731
    monkeypatch.setattr(completion, "TextGenerator", lambda *given, **named: (given, named))
    monkeypatch.setattr(
        writing, "sized", lambda *given: made.append(given) or SimpleNamespace(look_up=look_up)
    )
    argv = "--model", "m", "--prompt", "ab", "--lookup", "4", "--ban", "c"
    out, _ = said(generate.main, model, *argv)
    assert out == "ab ab\n"
    ((generator, named), (prompt,), count), (again, same, proposed) = made
    assert generator == (CONFIG, model.params, model.tokenizer)
    named["key"] = jax.random.key_data(named["key"]).tolist()[-1]
    assert named == PLAIN | {"processors": (tj.Ban(3), tj.Ban(4)), "stop_ids": (28,)}
    assert prompt is again is model.answers["read"] and count == same == 9 and proposed == 4
    assert said.errors == ("3 of 8 proposed tokens accepted, 5 calls of the model for 9 tokens\n")
    assert said(generate.main, Recorder(), *argv, "--chat")[0] == "ab\n"


def test_a_run_is_loaded_and_held_as_the_flags_say(said, monkeypatch, capsys):
    from transformer_jax.text import text_model

    loaded, model = [], Recorder()
    monkeypatch.setattr(
        text_model, "load_run",
        lambda *given, **named: (
            loaded.append((given, named)) or SimpleNamespace(which="last", step=3)
        ),
    )  # fmt: skip
    monkeypatch.setattr(language_model, "with_weights_held", lambda *given: given)
    monkeypatch.setattr(
        language_model, "LanguageModel", lambda *given: loaded.append(given) or model
    )
    argv = "--run", "r", "--init-from", "b", "--weights", "int8", "--prompt", "a"
    assert said(generate.main, model, *argv)[0] == "a!x!x\n"
    assert loaded[0] == (("r", None), {"init_from": "b"})
    assert loaded[1][0][1] == "int8" and loaded[1][1] == "r"
    line = "no step was evaluated yet: this is the last one saved, step 3\n"
    assert said.errors == "generate: " + line
    said(generate.main, model, *argv[:2], "--checkpoint", "last", "--prompt", "a")
    assert said.errors == "" and loaded[2] == (("r", "last"), {"init_from": None})
    assert said(nearest.main, model, "--run", "r", "--word", "king")[0].startswith(" 0.9877  king")
    assert said.errors == "nearest: " + line and loaded[-1][1] == "r"


NATS = Score(tokens=("a", "b", "c", "d"), token_nats=np.array([0.5, 1.0, 1.5, 1.0]), num_bytes=8)


def test_a_model_is_judged_as_the_flags_say(said, monkeypatch, tmp_path):
    run = lambda model, *argv: said(evaluate.main, model, "--model", "m", *argv)  # noqa: E731
    model = Recorder(score=NATS)
    out, asked = run(model, "--prompt", "ab", "--json")
    wanted = {
        "tokens": 4, "nats": 4.0, "nats_per_token": 1.0, "perplexity": np.e,
        "bits_per_byte": 4 / np.log(2) / 8,
    }  # fmt: skip
    assert json.loads(out) == pytest.approx(wanted)
    assert asked == [("score", ("ab",), {"edit": {}})] and said.loaded == [
        ("m", {"dtype": "float32"})
    ]
    out, asked = run(model, "--prompt", "ab", "--target", "c")
    assert out.splitlines() == [
        "tokens          4", "nats            4", "nats_per_token  1",
        "perplexity      2.71828", "bits_per_byte   0.721348",
    ]  # fmt: skip
    assert asked == [("score", (("ab", "c"),), {"edit": {}})]
    chat = Recorder("chat", score=NATS)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert run(chat, "--prompt", "a", "--target", "b")[1] == [("score", (talk,), {"edit": {}})]
    out, asked = run(Recorder("labels"), "--prompt", "ab")
    assert out == "label        good\nprobability  0.75\n"
    assert asked == [("classify", ("ab",), {"edit": {}})]
    text = tmp_path / "text"
    text.write_text("abc\n")
    _, asked = run(model, "--text", text, "--window", 5, "--stride", 2, "--batch-size", 3)
    assert asked == [("score", ("abc\n",), dict(window=5, stride=2, batch_size=3, edit={}))]
    _, asked = run(model, "--text", text)
    assert asked == [("score", ("abc\n",), dict(window=None, stride=None, edit={}))]
    file = tmp_path / "questions"
    file.write_text('{"context": "a", "choices": ["b", "c"], "answer": 1}\n')
    out, asked = run(model, "--choices", file, "--json", "--batch-size", 3)
    found = {"questions": 1, "accuracy": 0.5, "accuracy_per_character": 0.25}
    assert json.loads(out) == found | {"accuracy_per_byte": 0.75}
    ((_, (questions,), named),) = asked
    assert (named, questions[0].answer) == (dict(batch_size=3, edit={}), 1)

    place = "block_0/attention/heads"
    _, asked = run(model, "--prompt", "a", "--zero", place, "--heads", 0, 2)
    assert asked[0][2]["edit"].keys() == tj.inside.zero(place, heads=[0, 2]).keys()
    told = []

    def judge(model, data, **options):
        told.append((model, data, options))
        return {"exact_match": 0.5}

    monkeypatch.setattr(evaluation, "evaluate", judge)
    out, _ = run(
        model, "--data", "file", "--targets", "t", "--examples", 3, "--beams", 2, "--context", 7
    )
    assert out == "exact_match  0.5\n"
    assert said.errors.startswith("evaluate: BLEU and chrF need sacrebleu")
    ((given, data, options),) = told
    report = options.pop("report")
    assert type(report).__name__ == "DecodingLine" and (given, data) == (model, "file")
    assert options == dict(targets="t", examples=3, beams=2, context=7, task=None, edit={}) | {
        k: v for k, v in options.items() if k == "data"
    }


def test_what_is_inside_is_asked_drawn_and_printed(said, tmp_path):
    drawn = []

    def picture(**given):
        drawn.append(given)
        return SimpleNamespace(savefig=drawn.append)

    seen = SimpleNamespace(html=lambda: "<p>é", plot=picture, summary=lambda: "the summary")
    model = Recorder(lens=seen, patch=seen, heads=seen, attribution=seen, attend=seen)
    page, png = tmp_path / "a.html", tmp_path / "a.png"
    run = lambda model, *argv: said(inside.main, model, "--model", "m", *argv)  # noqa: E731
    out, asked = run(model, "--prompt", "ab", "--out", page)
    assert out == f"the summary\ndrawn: {page}\n" and page.read_text("utf-8") == "<p>é"
    assert asked == [("lens", ("ab",), {})] and drawn == []
    answer = "--answer", "x", "--other-answer", "y"
    _, asked = run(
        model, "--what", "patch", "--prompt", "ab", "--other", "ac", *answer, "--out", png
    )
    told = dict(answer="x", other_answer="y")
    assert asked == [("patch", ("ab", "ac"), told)] and drawn == [{}, png]
    for what, more in (("heads", ()), ("attribution", ("--baseline", "_"))):
        _, asked = run(model, "--what", what, "--prompt", "a", *answer, *more, "--out", png)
        assert asked == [(what, ("a",), told | ({"baseline": "_"} if more else {}))]
    pairs = Recorder("targets", lens=seen, patch=seen, attend=seen)
    out, asked = run(pairs, "--prompt", "ab", "--out", png)
    assert out == f"ab -> !x\nthe summary\ndrawn: {png}\n"
    assert asked == [("generate", ("ab", 10), {}), ("lens", (("ab", "!x"),), {})]
    patch = "--what", "patch", "--prompt", "ab", "--other", "c", "--out", png
    assert run(pairs, *patch)[1] == [("patch", (("ab", ""), ("ab", "c")), {})]
    assert run(pairs, *patch, "--target", "d")[1] == [("patch", (("ab", "d"), ("ab", "c")), {})]

    drawn.clear()
    run = lambda model, *argv: said(attention.main, model, "--model", "m", *argv)  # noqa: E731
    out, asked = run(pairs, "--prompt", "ab", "--out", png, "--part", "cross", "--layer", 1)
    assert out == f"ab -> !x\ndrawn: {png}\n"
    assert asked == [("generate", ("ab",), {}), ("attend", (("ab", "!x"),), {})]
    assert drawn == [dict(part="cross", layer=1, head=None), png]
    out, asked = run(pairs, "--prompt", "ab", "--target", "c", "--out", png)
    assert out.startswith("ab -> c\n") and asked == [("attend", (("ab", "c"),), {})]
    out, asked = run(model, "--prompt", "ab", "--head", 2, "--out", png)
    assert asked == [("attend", ("ab",), {})] and drawn[-2] == dict(part=None, layer=None, head=2)
    argv = "--model", "m", "--word", "king", "--minus", "man", "--plus", "a", "--plus", "b"
    out, asked = said(nearest.main, model, *argv, "--count", 2)
    assert out == " 0.9877  king\n-0.5000  ␣man\n"
    assert asked == [("nearest", ("king",), dict(minus=["man"], plus=["a", "b"], count=2))]


def test_a_decoder_is_exported_with_its_tokenizer(said, monkeypatch):
    from transformer_jax.text import export as exporting

    made, model = [], Recorder()
    model.model.processors = ()
    monkeypatch.setattr(
        exporting, "export_decoder", lambda *given, **named: made.append((given, named))
    )
    argv = (
        "--model",
        "m",
        "--to",
        "new folder",
        "--context",
        7,
        "--batch",
        3,
        "--platforms",
        "cpu,tpu",
    )
    loading = "--dtype", "bfloat16", "--weights", "int8", "--checkpoint", "last"
    out, _ = said(export.main, model, *argv, *loading)
    assert out == "new folder: written; python new folder/decode.py 'a text' decodes\n"
    assert said.loaded == [("m", dict(checkpoint="last", dtype="bfloat16", weights="int8"))]
    ((given, named),) = made
    assert given == ("new folder", CONFIG, model.params)
    tokenizer = json.loads(named.pop("files")["tokenizer.json"])
    assert tokenizer["model"]["vocab"]["a"] == 2
    assert named == dict(context=7, batch=3, platforms=["cpu", "tpu"], first=(), stop=(28,))
    model.model.begin_id = 5
    said(export.main, model, "--model", "m", "--to", "f")
    assert made[-1][1]["first"] == (5,) and made[-1][1]["platforms"] == ["cpu", "cuda", "tpu"]
    assert made[-1][1]["batch"] is made[-1][1]["context"] is None
    model.model.processors = (tj.Ban(1),)
    said(export.main, model, "--model", "m", "--to", "f", status=2)
    assert said.errors.startswith("export: the model was published with tokens that it never")
    model.model.processors, model.model.tokenizer = (), CharTokenizer("\ud800")
    out, _ = said(export.main, model, "--model", "m", "--to", "f")
    one, two = out.splitlines()
    assert one.endswith(
        "takes token ids: the run's characters hold a lone surrogate, which has no UTF-8"
    )
    assert two == "f: written; python f/decode.py '1,2,3' decodes" and made[-1][1]["files"] == {}
