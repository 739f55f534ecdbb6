"""Commands pass their flags to a model and print its results; the model is a recorder."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

import transformer_jax as tj
from transformer_jax.cli import convert, evaluate, export, generate, inspect, nearest
from transformer_jax.config import LoraConfig
from transformer_jax.config.tasks import ClassifyTask, DigitsTask, Seq2SeqTask
from transformer_jax.decoding.samplers import MinP, Sample, Temperature, TopK, TopP, Typical
from transformer_jax.models.factory import init_params
from transformer_jax.text import evaluation, language_model
from transformer_jax.text import save as saving
from transformer_jax.text.scores import Score
from transformer_jax.tokenizers.special import with_special_tokens
from transformer_jax.tokenizers.trained import CharTokenizer
from transformer_jax.training.tasks.task import Tokenizers

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
    """Model whose methods return ANSWERS, or lists of them for lists of texts."""

    def __init__(self, kind="text", task=None, **changes):
        tokenizer = with_special_tokens(CharTokenizer(" !abcdefghijklmnopqrstuvwxyz"), ["eos"])
        self.kind, self.task, self.name, self.masks = kind, task, "the model", ("[MASK]",)
        self.tokenizers, self.tokenizer = Tokenizers(tokenizer), tokenizer
        self.config, self.params, self.calls = CONFIG, {"p": 1}, []
        self.model = SimpleNamespace(
            tokenizer=tokenizer, config=CONFIG, processors=(tj.Ban(3),), stop_ids=(28,),
            run="a run", params=self.params, begin_id=None, which=None, step=None,
        )  # fmt: skip
        self.run, self.answers = "a run", ANSWERS | changes

    inspect = property(lambda self: self)
    fitting = language_model.LanguageModel.fitting  # calls `room`
    save = language_model.LanguageModel.save
    module = SimpleNamespace(edits=())

    def with_languages(self, *names):
        self.calls.append(("with_languages", names, {}))
        return self

    def edited(self, edit):
        self.calls.append(("edited", (edit,), {}))
        return self

    def __getattr__(self, name):
        if name.startswith("__") or name not in self.answers:
            raise AttributeError(name)

        def call(*arguments, **kwargs):
            if name not in ("read", "read_messages", "room", "instead"):
                if "key" in kwargs:
                    kwargs["key"] = jax.random.key_data(kwargs["key"]).tolist()[-1]
                self.calls.append((name, arguments, kwargs))
            found = self.answers[name]
            if kwargs.get("stream") or (
                arguments and isinstance(arguments[0], list) and name not in ("search", "score")
            ):
                count = 2 if kwargs.get("stream") else len(arguments[0])
                return [found] * count if name != "multiple_choice" else found
            return [found] * kwargs["samples"] if "samples" in kwargs else found

        return call


@pytest.fixture
def invoke(monkeypatch, capsys):
    """Run a command on a model; return its output and the calls of the model."""

    def run(main, model, *argv, status=0):
        loaded = []

        def load(name, **arguments):
            loaded.append((name, arguments))
            return model

        monkeypatch.setattr(language_model, "load", load)
        assert main([str(word) for word in argv]) == status, capsys.readouterr()
        requests, model.calls[:] = list(model.calls), []
        run.loaded = loaded
        out, run.errors = capsys.readouterr()
        return out, requests

    return run


PLAIN = dict(processors=(), sampler=Sample(Temperature(0.8)), key=0, stop=())


def test_generate_command_passes_flags_to_model(invoke, tmp_path):
    run = lambda model, *argv: invoke(generate.main, model, "--model", "m", *argv)  # noqa: E731
    out, requests = run(Recorder(), "--prompt", "ab")
    assert (out, requests) == ("ab!x!x\n", [("generate", ("ab", None), {"stream": True} | PLAIN)])
    flags = (
        "--temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --typical-p 0.7 --num-tokens 4 "
        "--seed 7 "
        "--repetition-penalty 1.2 --presence-penalty 0.3 --frequency-penalty 0.4 --stop X --stop Y "
        "--no-repeat-ngram 2 --ban ab --force c --cache-dtype int8 --dtype bfloat16 --weights int4 "
        "--max-len 11 --samples 2 --prompt a --regex a+"
    )
    arguments = dict(
        cache_dtype="int8", key=7, stop=("X", "Y"), samples=2, regex="a+",
        processors=(
            tj.RepetitionPenalty(1.2), tj.PresencePenalty(0.3), tj.FrequencyPenalty(0.4),
            tj.NoRepeatNGram(2), tj.Ban(2, 3), tj.Force(4),
        ),
        sampler=Sample(Temperature(0.5), TopK(3), TopP(0.9), MinP(0.1), Typical(0.7)),
    )  # fmt: skip
    out, requests = run(Recorder(), *flags.split())
    assert (out, requests) == ("--- 1\na!x\n--- 2\na!x\n", [("generate", ("a", 4), arguments)])
    loaded = dict(dtype="bfloat16", max_len=11, weights="int4", checkpoint=None, init_from=None)
    assert invoke.loaded == [("m", loaded)]
    file = tmp_path / "lines"
    file.write_text("ab\n\nc\n")
    out, requests = run(Recorder(), "--prompts", file, "--slots", "3")
    assert out == "--- 1\nab!x\n--- 2\nc!x\n"
    assert requests == [("generate", (["ab", "c"], 9), {"slots": 3} | PLAIN)]  # as many as fit
    out, requests = run(Recorder(), "--prompts", file, "--num-tokens", "2")
    assert requests == [("generate", (["ab", "c"], 2), PLAIN)]
    for kind, more in (("text", ("--chat",)), ("chat", ())):
        out, requests = run(Recorder(kind), "--prompt", "hi", *more)
        assert (out, requests) == ("!y!y\n", [("chat", ("hi", None), {"stream": True} | PLAIN)])
    out, requests = run(Recorder("targets"), "--prompt", "ab", "--languages", "x,y", "--samples", 2)
    assert out == "--- 1\n!x\n--- 2\n!x\n"
    assert requests == [
        ("with_languages", ("x", "y"), {}), ("generate", ("ab", None), {"samples": 2} | PLAIN)
    ]  # fmt: skip
    grammar, schema = tmp_path / "g", tmp_path / "s"
    grammar.write_text('start: "a"')
    schema.write_text('{"maximum": 1.50}')
    ((_, _, kwargs),) = run(Recorder(), "--prompt", "a", "--grammar", grammar)[1]
    assert kwargs == {"stream": True, "grammar": 'start: "a"'} | PLAIN
    ((_, _, kwargs),) = run(Recorder(), "--prompt", "a", "--schema", schema)[1]
    assert kwargs.keys() == PLAIN.keys() | {"stream", "schema"}
    assert str(kwargs["schema"]["maximum"]) == "1.50"


def test_generate_command_prints_beams_answers_and_filled_masks(invoke, tmp_path):
    run = lambda model, *argv: invoke(generate.main, model, "--model", "m", *argv)  # noqa: E731
    search = dict(beams=3, results=2, length_penalty=0.5, processors=())
    out, requests = run(
        Recorder(), "--prompt", "ab", "--beams", 3, "--samples", 2, "--length-penalty", 0.5
    )
    assert out == "--- score -1.2500\nab a\n--- score -2.0000\nabb\n"
    assert requests == [("search", ("ab", 9), search)]
    out, requests = run(Recorder(), "--prompt", "ab", "--beams", 3, "--chat", "--num-tokens", 4)
    assert out == "--- score -1.2500\na\n--- score -2.0000\nb\n"
    ((name, (read, count), kwargs),) = requests
    assert (name, list(read), count) == ("search", [*range(7)], 4)
    assert kwargs == dict(beams=3, processors=())
    out, requests = run(Recorder("targets"), "--prompt", "ab", "--beams", 3)
    assert requests == [("search", ("ab", None), dict(beams=3, processors=()))]
    assert out.splitlines()[1] == " a"

    pairs = Recorder("targets", Seq2SeqTask(beams=2))
    file = tmp_path / "lines"
    file.write_text("ab\nc\n")
    assert run(pairs, "--prompts", file) == (
        "!x\n!x\n", [("generate", (["ab", "c"], None), dict(beams=2, stop=(), processors=()))]
    )  # fmt: skip
    out, requests = run(pairs, "--prompt", "ab", "--beams", 4, "--num-tokens", 3)
    assert (out, requests) == (
        "!x\n", [("generate", (["ab"], 3), dict(beams=4, stop=(), processors=()))]
    )  # fmt: skip
    out, requests = run(pairs, "--prompt", "ab", "--beams", 4, "--samples", 2)
    wanted = dict(beams=4, results=2, processors=())
    assert requests == [("search", ("ab", None), wanted)]
    assert out == "--- score -1.2500\n a\n--- score -2.0000\nb\n"
    out, requests = run(pairs, "--prompt", "ab", "--samples", 2)
    assert requests == [("generate", ("ab", None), {"samples": 2} | PLAIN)]
    labels = Recorder("labels")
    assert run(labels, "--prompt", "ab") == ("good 0.750\n", [("classify", (["ab"],), {})])
    masks = Recorder("masks", generate="a\rb")
    out, requests = run(masks, "--prompt", "a[MASK]", "--samples", 3)
    assert out == "a\rb\n  a 0.500  ␣b 0.250\n  c 1.000\n"
    assert requests == [
        ("generate", (["a[MASK]"],), {}), ("candidates", ("a[MASK]",), {"count": 3})
    ]  # fmt: skip
    assert run(masks, "--prompts", file)[0] == "a\\rb\n" * 2
    assert run(masks, "--prompt", "_")[1][1] == ("candidates", ("_",), {"count": 5})


def test_generate_command_supports_signals_and_prompt_lookup(invoke, monkeypatch, tmp_path):
    from transformer_jax.lectures import tasks

    task, model = DigitsTask(), Recorder("signals", DigitsTask())
    read = lambda *arguments, **kwargs: (arguments, kwargs)  # noqa: E731
    monkeypatch.setattr(tasks, "read_signals", read)
    seen = []
    monkeypatch.setattr(
        tasks, "answer_signals", lambda *arguments: seen.append(arguments) or ["three", "one"]
    )
    out, _ = invoke(generate.main, model, "--model", "m", "--prompts", "f.npz")
    assert out == "three\none\n"
    file = ((task, "f.npz"), {"targets": False})
    assert seen == [("a run", model.tokenizers, model.params, file)]

    counts = SimpleNamespace(
        accepted=np.array([3]), proposed=np.array([8]), calls=5, lengths=np.array([9])
    )
    model = Recorder(look_up=(" ab", counts))
    argv = "--model", "m", "--prompt", "ab", "--lookup", "4", "--ban", "c"
    out, requests = invoke(generate.main, model, *argv)
    assert out == "ab ab\n"
    assert requests == [("look_up", ("ab", None, 4), PLAIN | {"processors": (tj.Ban(4),)})]
    assert invoke.errors == ("3 of 8 proposed tokens accepted, 5 calls of the model for 9 tokens\n")
    assert invoke(generate.main, model, *argv, "--chat")[0] == "ab\n"


def test_generate_command_prints_each_answer_on_one_line(invoke, tmp_path):
    (tmp_path / "lines").write_text("x [MASK]\ny [MASK]\n")
    model = Recorder("masks", generate="a\nb\r\x0b\x85\u2028c é")
    out, _ = invoke(generate.main, model, "--model", "m", "--prompts", tmp_path / "lines")
    assert out.splitlines() == [r"a\nb\r\x0b\x85\u2028c é"] * 2


def test_loading_flags_are_passed_to_loader(invoke):
    model = Recorder()
    model.model.which, model.model.step = "last", 3
    argv = "--model", "r", "--init-from", "b", "--weights", "int8", "--prompt", "a"
    assert invoke(generate.main, model, *argv)[0] == "a!x!x\n"
    arguments = dict(checkpoint=None, init_from="b", weights="int8", dtype=None, max_len=None)
    assert invoke.loaded == [("r", arguments)]
    line = "no checkpoint has been evaluated yet; using the last one, step 3\n"
    assert invoke.errors == "generate: " + line
    invoke(generate.main, model, *argv[:2], "--checkpoint", "last", "--prompt", "a")
    assert invoke.errors == "" and invoke.loaded[0][1]["checkpoint"] == "last"
    assert invoke(nearest.main, model, "--model", "r", "--word", "king")[0].startswith(
        " 0.9877  king"
    )
    assert invoke.errors == "nearest: " + line


NATS = Score(tokens=("a", "b", "c", "d"), token_nats=np.array([0.5, 1.0, 1.5, 1.0]), num_bytes=8)


def test_evaluate_command_passes_flags_to_model(invoke, monkeypatch, tmp_path):
    run = lambda model, *argv: invoke(evaluate.main, model, "--model", "m", *argv)  # noqa: E731
    model = Recorder(score=NATS)
    out, requests = run(model, "--prompt", "ab", "--json")
    wanted = {
        "tokens": 4, "nats": 4.0, "nats_per_token": 1.0, "perplexity": np.e,
        "bits_per_byte": 4 / np.log(2) / 8,
    }  # fmt: skip
    assert json.loads(out) == pytest.approx(wanted)
    assert requests == [("score", ("ab",), {})] and invoke.loaded == [
        ("m", {"dtype": "float32", "checkpoint": None, "init_from": None})
    ]
    out, requests = run(model, "--prompt", "ab", "--target", "c")
    assert out.splitlines() == [
        "tokens          4", "nats            4", "nats_per_token  1",
        "perplexity      2.71828", "bits_per_byte   0.721348",
    ]  # fmt: skip
    assert requests == [("score", (("ab", "c"),), {})]
    chat = Recorder("chat", score=NATS)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert run(chat, "--prompt", "a", "--target", "b")[1] == [("score", (talk,), {})]
    out, requests = run(Recorder("labels"), "--prompt", "ab")
    assert out == "label        good\nprobability  0.75\n"
    assert requests == [("classify", ("ab",), {})]
    text = tmp_path / "text"
    text.write_text("abc\n")
    _, requests = run(model, "--text", text, "--window", 5, "--stride", 2, "--batch-size", 3)
    assert requests == [("score", ("abc\n",), dict(window=5, stride=2, batch_size=3))]
    _, requests = run(model, "--text", text)
    assert requests == [("score", ("abc\n",), dict(window=None, stride=None))]
    file = tmp_path / "questions"
    file.write_text('{"context": "a", "choices": ["b", "c"], "answer": 1}\n')
    out, requests = run(model, "--choices", file, "--json", "--batch-size", 3)
    found = {"questions": 1, "accuracy": 0.5, "accuracy_per_character": 0.25}
    assert json.loads(out) == found | {"accuracy_per_byte": 0.75}
    ((_, (questions,), kwargs),) = requests
    assert (kwargs, questions[0].answer) == (dict(batch_size=3), 1)

    place = "block_0/attention/heads"
    _, requests = run(model, "--prompt", "a", "--zero", place, "--heads", 0, 2)
    (name, (edit,), _), score = requests
    assert name == "edited" and edit.keys() == tj.interpret.zero(place, heads=[0, 2]).keys()
    assert score == ("score", ("a",), {})
    evaluated = []

    def judge(model, data, **options):
        evaluated.append((model, data, options))
        return {"exact_match": 0.5}

    monkeypatch.setattr(evaluation, "evaluate", judge)
    out, _ = run(
        model, "--data", "file", "--targets", "t", "--examples", 3, "--beams", 2, "--context", 7
    )
    assert out == "exact_match  0.5\n"
    assert invoke.errors.startswith("evaluate: BLEU and chrF need sacrebleu")
    ((arguments, data, options),) = evaluated
    report = options.pop("report")
    assert type(report).__name__ == "DecodingLine" and (arguments, data) == (model, "file")
    assert options == dict(targets="t", examples=3, beams=2, context=7, task=None) | {
        k: v for k, v in options.items() if k == "data"
    }


def test_inspect_command_passes_flags_and_draws_output(invoke, tmp_path):
    drawn = []

    def picture(**arguments):
        drawn.append(arguments)
        return SimpleNamespace(savefig=drawn.append)

    seen = SimpleNamespace(html=lambda: "<p>é", plot=picture, summary=lambda: "the summary")
    model = Recorder(lens=seen, patch=seen, heads=seen, attribution=seen, attention=seen)
    page, png = tmp_path / "a.html", tmp_path / "a.png"
    run = lambda model, *argv: invoke(inspect.main, model, "--model", "m", *argv)  # noqa: E731
    out, requests = run(model, "--prompt", "ab", "--out", page)
    assert out == f"the summary\ndrawn: {page}\n" and page.read_text("utf-8") == "<p>é"
    assert requests == [("lens", ("ab",), {})] and drawn == []
    answer = "--answer", "x", "--other-answer", "y"
    _, requests = run(
        model, "--what", "patch", "--prompt", "ab", "--other", "ac", *answer, "--out", png
    )
    evaluated = dict(answer="x", other_answer="y")
    assert requests == [("patch", ("ab", "ac"), evaluated)] and drawn == [{}, png]
    for what, more in (("heads", ()), ("attribution", ("--baseline", "_"))):
        _, requests = run(model, "--what", what, "--prompt", "a", *answer, *more, "--out", png)
        assert requests == [(what, ("a",), evaluated | ({"baseline": "_"} if more else {}))]
    pairs = Recorder("targets", lens=seen, patch=seen, attention=seen)
    out, requests = run(pairs, "--prompt", "ab", "--out", png)
    assert out == f"ab -> !x\nthe summary\ndrawn: {png}\n"
    assert requests == [("generate", ("ab", 10), {}), ("lens", (("ab", "!x"),), {})]
    nothing = dict(answer=None, other_answer=None)
    patch = "--what", "patch", "--prompt", "ab", "--other", "c", "--out", png
    assert run(pairs, *patch)[1] == [("patch", (("ab", ""), ("ab", "c")), nothing)]
    assert run(pairs, *patch, "--target", "d")[1] == [
        ("patch", (("ab", "d"), ("ab", "c")), nothing)
    ]

    drawn.clear()
    seeing = "--model", "m", "--what", "attention"
    run = lambda model, *argv: invoke(inspect.main, model, *seeing, *argv)  # noqa: E731
    out, requests = run(pairs, "--prompt", "ab", "--out", png, "--part", "cross", "--layer", 1)
    assert out == f"ab -> !x\ndrawn: {png}\n"
    assert requests == [("generate", ("ab",), {}), ("attention", (("ab", "!x"),), {})]
    assert drawn == [dict(part="cross", layer=1, head=None), png]
    out, requests = run(pairs, "--prompt", "ab", "--target", "c", "--out", png)
    assert out.startswith("ab -> c\n") and requests == [("attention", (("ab", "c"),), {})]
    out, requests = run(model, "--prompt", "ab", "--head", 2, "--out", png)
    assert requests == [("attention", ("ab",), {})]
    assert drawn[-2] == dict(part=None, layer=None, head=2)
    argv = "--model", "m", "--word", "king", "--minus", "man", "--plus", "a", "--plus", "b"
    out, requests = invoke(nearest.main, model, *argv, "--count", 2)
    assert out == " 0.9877  king\n-0.5000  ␣man\n"
    assert requests == [("nearest", ("king",), dict(minus=("man",), plus=("a", "b"), count=2))]


def test_exported_folder_includes_tokenizer(invoke, monkeypatch):
    from transformer_jax.text import export as exporting

    made, model = [], Recorder()
    model.model.processors = ()
    monkeypatch.setattr(
        exporting, "export_decoder", lambda *arguments, **kwargs: made.append((arguments, kwargs))
    )
    argv = "--model", "m", "--to", "new folder", "--context", 7, "--batch", 3
    argv = *argv, "--platforms", "cpu,tpu"
    loading = "--dtype", "bfloat16", "--weights", "int8", "--checkpoint", "last"
    out, _ = invoke(export.main, model, *argv, *loading)
    assert out == "new folder: written; to decode: python new folder/decode.py 'a text'\n"
    assert invoke.loaded == [
        ("m", dict(checkpoint="last", init_from=None, dtype="bfloat16", weights="int8"))
    ]
    ((arguments, kwargs),) = made
    assert arguments == ("new folder", CONFIG, model.params)
    tokenizer = json.loads(kwargs.pop("files")["tokenizer.json"])
    assert tokenizer["model"]["vocab"]["a"] == 2
    assert kwargs == dict(context=7, batch=3, platforms=["cpu", "tpu"], first=(), stop=(28,))
    model.model.begin_id = 5
    invoke(export.main, model, "--model", "m", "--to", "f")
    assert made[-1][1]["first"] == (5,) and made[-1][1]["platforms"] == ["cpu", "cuda", "tpu"]
    assert made[-1][1]["batch"] is made[-1][1]["context"] is None
    model.model.processors = (tj.Ban(1),)
    invoke(export.main, model, "--model", "m", "--to", "f", status=2)
    assert invoke.errors.startswith("export: the model's generation config excludes tokens")
    model.model.processors, model.model.tokenizer = (), CharTokenizer("\ud800")
    out, _ = invoke(export.main, model, "--model", "m", "--to", "f")
    one, two = out.splitlines()
    assert one.endswith(
        "takes token IDs: the run's characters include a lone surrogate, which UTF-8 cannot encode"
    )
    assert two == "f: written; to decode: python f/decode.py '1,2,3'" and made[-1][1]["files"] == {}


REFUSED = [
    (generate, "text", "", "--model TEXT is required"),
    (generate, "text", "--run r", "--run: no such flag; use --model"),
    (generate, "text", "--model r --tokens 3", "--tokens: no such flag; use --num-tokens"),
    (generate, "text", "--model m --seed -1", "seed is -1: must be at least 0 and below 2**32"),
    (generate, "text", "--model m --seed 4294967296", "seed is 4294967296: must be at least 0 and"),
    (generate, "text", "--model m --num-tokens 0", "num_tokens is 0: must be an integer of at lea"),
    (generate, "text", "--model m --beams 2 --lookup 2", "pass only one of beams and lookup"),
    (generate, "text", "--model m --prompts p --samples 2", "pass only one of samples and prompts"),
    (generate, "text", "--model m --lookup 3 --samples 2", "pass only one of samples and lookup"),
    (generate, "text", "--model m --beams 0", "beams is 0: must be an integer of at least 1"),
    (generate, "text", "--model m --slots 0", "slots is 0: needs prompts"),
    (generate, "text", "--model m --beams 2 --samples 3", "samples is 3: must be at most beams, 2"),
    (generate, "text", "--model m --length-penalty 1", "length_penalty is 1.0: needs beams"),
    (generate, "text", "--model m --slots 2", "slots is 2: needs prompts"),
    (generate, "text", "--model m --beams 2 --top-k 3", "top_k is not supported with beams"),
    (generate, "text", "--model m --beams 2 --seed 0", "seed is not supported with beams"),
    (generate, "text", "--model m --prompts p --prompt a", "pass only one of prompt and prompts"),
    (generate, "text", "--model m --regex a --grammar g", "pass only one of regex and grammar"),
    (generate, "text", "--model m --regex a --lookup 3", "pass only one of regex and lookup"),
    (generate, "text", "--model m --languages a", "languages is 'a': must be two languages, such"),
    (generate, "text", "--model m --prompt a --beams 2 --num-tokens 10",
     "num_tokens is 10: at most 9 fit after the prompt (max_len 20)"),
    (generate, "text", "--model m --prompt a --temperature -1", "temperature is -1.0: must be"),
    (generate, "chat", "--model m", "prompt is '': the model needs prompt or prompts"),
    (generate, "labels", "--model m --prompt a --num-tokens 3",
     "num_tokens is 3: the model supports only prompt, prompts, checkpoint"),
    (generate, "masks", "--model m --prompt a --top-k 3",
     "top_k is 3: the model supports only prompt, prompts, checkpoint, samples"),
    (generate, "signals", "--model m", "prompts is None: a run for task 'digits' reads numbers"),
    (evaluate, "text", "--model m", "pass exactly one of data, prompt, text and choices"),
    (evaluate, "text", "--model m --data d --prompt p", "pass exactly one of data, prompt, text"),
    (evaluate, "text", "--model m --data d --window 3", "window is 3: needs text"),
    (evaluate, "text", "--model m --prompt p --batch-size 3", "batch_size is 3: needs text or cho"),
    (evaluate, "text", "--model m --text x --choices y",
     "pass exactly one of data, prompt, text an"),
    (evaluate, "text", "--model m --prompt p --window 3", "window is 3: needs text"),
    (evaluate, "text", "--model m --choices a --stride 3", "stride is 3: needs text"),
    (evaluate, "text", "--model m --data x --target a", "target is 'a': needs prompt"),
    (evaluate, "text", "--model m --prompt a --beams 2", "beams is 2: needs data"),
    (evaluate, "text", "--model m --prompt p --heads 0", "heads is [0]: also pass zero, the place"),
    (evaluate, "chat", "--model m --prompt p", "target is None: it says labels; pass the answer"),
    (evaluate, "targets", "--model m --prompt p", "target is None: it says labels; pass the targ"),
    (evaluate, "labels", "--model m --prompt p --target t", "target is 't': it says labels"),
    (inspect, "text", "--model m --prompt=", "prompt is '': must not be empty"),
    (inspect, "text", "--model m --prompt a --other b", "other is 'b': needs what to be patch"),
    (inspect, "text", "--model m --prompt a --answer b",
     "answer is 'b': needs what to be patch or heads or attribution"),
    (inspect, "text", "--model m --prompt a --what patch", "other is None: must be the prompt"),
    (inspect, "text", "--model m --prompt a --target b",
     "target is 'b': it says labels, without t"),
    (inspect, "text", "--model m --prompt a --out a.gif", "out is 'a.gif': must end in .png or"),
    (inspect, "text", "--model m --prompt a --out no/a.png", "out is 'no/a.png': must be a file"),
    (inspect, "text", "--model m --prompt a --what attention --out a.html",
     "out is 'a.html': must"),
    (inspect, "text", "--model m --prompt a --what attention --answer b",
     "answer is 'b': needs what to be patch or heads or attribution"),
    (inspect, "text", "--model m --prompt a --head 0", "head is 0: needs what to be attention"),
    (inspect, "text", "--model m --prompt a --baseline b",
     "baseline is 'b': needs what to be attribution"),
    (inspect, "text", "--prompt a", "--model TEXT is required"),
    (inspect, "text", "--model m", "--prompt TEXT is required"),
    (nearest, "text", "--model m", "--word TEXT is required"),
    (convert, "text", "--to t", "--model TEXT is required"),
    (convert, "text", "--to t --model m --adapter", "adapter is True: allowed only for a run, but"),
    (convert, "text", "--to t --model m --family bert",
     "family is 'bert': allowed only for a run,"),
    (convert, "text", "--to t --model RUN --adapter --shard-gb 1",
     "shard_gb cannot be used with adapter: an adapter"),
    (convert, "text", "--to t --model r --shard-gb 0",
     "shard_gb is 0.0: must be above 0 and below"),
    (convert, "text", "--to t --model r --shard-gb 1e6",
     "shard_gb is 1000000.0: must be above 0 an"),
    (convert, "text", "--to . --model m", "to is '.': must be new or empty"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "kind", "argv", "message"), REFUSED)
def test_contradictory_flags_raise_one_line_error(invoke, tmp_path, module, kind, argv, message):
    (tmp_path / "checkpoints").mkdir()  # makes the folder a run
    argv = argv.replace("RUN", str(tmp_path))
    task = {"pairs": Seq2SeqTask(), "signals": DigitsTask()}.get(kind)
    model = Recorder({"pairs": "targets"}.get(kind, kind), task)
    invoke(module.main, model, *argv.split(), status=2)
    (line,) = invoke.errors.splitlines()
    assert line.startswith(f"{module.__name__.rpartition('.')[2]}: {message}")


def test_prompts_file_with_blank_line_is_rejected(invoke, tmp_path, monkeypatch):
    file = tmp_path / "lines"
    file.write_text("a\n \nb\n")
    argv = "--model", "m", "--prompts", file
    invoke(generate.main, Recorder("labels"), *argv, status=2)
    rule = "line 2 is empty, but every line must have text"
    assert invoke.errors == f"generate: prompts is {str(file)!r}: {rule}\n"
    file.write_text(" \n\n")
    invoke(generate.main, Recorder(), *argv, status=2)
    assert (
        invoke.errors
        == f"generate: prompts is {str(file)!r}: must have at least one line with text\n"
    )
    file.write_text("a\n")
    invoke(generate.main, Recorder(), *argv, "--beams", 2, status=2)
    assert invoke.errors == "generate: pass only one of prompts and beams\n"
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"x\ny\n")))
    out, _ = invoke(generate.main, Recorder(), *argv[:3], "-")
    assert out == "--- 1\nx!x\n--- 2\ny!x\n"


def test_convert_command_passes_run_to_writer(invoke, monkeypatch, tmp_path):
    """Check the arguments of `save_pretrained` and `save_lora`, which have their own tests."""
    from transformer_jax import loading
    from transformer_jax.pretrained import peft

    saved, target = [], tmp_path / "new"
    record = lambda *arguments, **kwargs: saved.append((arguments, kwargs))  # noqa: E731
    monkeypatch.setattr(saving, "save_pretrained", record)
    sizes = dict(vocab_size=29, d_model=4, num_heads=1, num_layers=1, max_len=9)
    tokenizer = with_special_tokens(
        CharTokenizer("abcdefghijklmnopqrstuvwxyz"), ["pad", "cls", "eos"]
    )
    encoder = tj.ModelConfig(kind="encoder", num_classes=2, pooler="tanh", **sizes)
    config = SimpleNamespace(task=ClassifyTask(labels=("no", "yes")))
    params = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float16)}
    run = SimpleNamespace(config=encoder, params=params, tokenizer=tokenizer, run=config)
    recorder = Recorder(task=config.task)
    recorder.model, run.which = run, "best"
    (tmp_path / "r" / "checkpoints").mkdir(parents=True)
    of_run = "--model", str(tmp_path / "r")
    dtypes = []
    monkeypatch.setattr(
        language_model, "with_param_dtype", lambda model, dtype: dtypes.append(dtype) or model
    )
    written_as = lambda config, family, definition: (family, config)  # noqa: E731
    monkeypatch.setattr(saving, "written_as", written_as)
    argv = *of_run, "--to", str(target), "--family", "bert", "--shard-gb", "0.5"
    out, _ = invoke(convert.main, recorder, *argv, "--dtype", "float16")
    one, two = out.splitlines()
    assert one == f"{target}: 10 parameters in float16 and float32 as a bert"
    assert two.startswith(
        "tokenizer.json: the run's 26 characters, as a BPE without merges; any other"
    )
    assert dtypes == ["float16"]
    ((arguments, kwargs),) = saved
    assert arguments == (target, encoder, params)
    files = {name: json.loads(content) for name, content in kwargs.pop("files").items()}
    keys = {
        "bos_token_id": None, "pad_token_id": 26, "eos_token_id": 28,
        "id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1},
    }  # fmt: skip
    assert kwargs == dict(family="bert", shard_bytes=500_000_000, keys=keys)
    assert files["generation_config.json"] == {"pad_token_id": 26, "eos_token_id": 28}
    assert files["tokenizer_config.json"] == {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "cls_token": "<cls>",
        "eos_token": "<eos>",
    }  # fmt: skip
    around = [next(iter(part)) for part in files["tokenizer.json"]["post_processor"]["single"]]
    assert around == ["SpecialToken", "Sequence"]  # <cls> before a text

    adapters = {"x": {"a": np.zeros((4, 2)), "b": np.zeros((2, 4))}}
    lora = LoraConfig(rank=2)
    training = SimpleNamespace(model=CONFIG, lora=lora, init_from="base")
    requests = []
    monkeypatch.setattr(
        loading, "load_adapters", lambda *g, **n: requests.append((g, n)) or (training, adapters)
    )
    monkeypatch.setattr(saving, "written_as", lambda config, family: ("gpt2", config))
    monkeypatch.setattr(
        peft, "save_lora", lambda *g, **n: saved.append((g, n)) or LoraConfig(rank=4)
    )
    argv = *of_run, "--to", str(target), "--adapter", "--checkpoint", "last", "--init-from", "i"
    out, _ = invoke(convert.main, Recorder(), *argv)
    wanted = f"{target}: adapters with 16 parameters and rank 4 for gpt2; base model: base\n"
    assert out == wanted and requests == [((of_run[1], "last"), {"init_from": "i"})]
    (folder, shapes, *rest, names), kwargs = saved[-1]
    assert folder == target and rest == [adapters, lora] and "transformer.wte.weight" in names
    assert shapes["embed"]["tokens"].shape == (29, 4)
    assert kwargs == dict(base_model="base", task_type="CAUSAL_LM", fan_in_fan_out=True)


def test_missing_biases_are_converted_to_zeros():
    config = tj.ModelConfig(vocab_size=7, d_model=4, num_heads=1, num_layers=1, max_len=3, d_ff=5)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    flat = {path: np.ones(leaf.shape, np.float16) for path, leaf in flatten_dict(shapes).items()}
    arguments = {
        path: leaf for path, leaf in flat.items() if path[-1] != "bias" or "norm" in path[-2]
    }
    found = flatten_dict(saving.with_zero_biases(config, unflatten_dict(arguments)))
    assert found.keys() == flat.keys() and len(found) > len(arguments)
    for path, leaf in found.items():
        assert leaf.dtype == np.float16 and leaf.shape == flat[path].shape
        assert (leaf == (path in arguments)).all()
