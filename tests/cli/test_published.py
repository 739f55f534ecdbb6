"""Commands on published models: generate, fine-tune and convert."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from tests.decoding.test_decode import parameters
from tests.support.drawn import drawn
from transformer_jax import build, init_params, loading
from transformer_jax.cli import generate as cli_generate
from transformer_jax.cli.convert import main as convert
from transformer_jax.cli.run_flags import configure, parse
from transformer_jax.config import ConfigError, Learned, ModelConfig, TrainConfig, fine_tuning
from transformer_jax.decoding.logit_processors import Ban, BanSequences, ForceLast
from transformer_jax.decoding.samplers import Sample, Temperature
from transformer_jax.loading import TextModel, load_run, load_text_model
from transformer_jax.pretrained.load import load_pretrained, pretrained_config
from transformer_jax.pretrained.save import save_pretrained
from transformer_jax.text import language_model
from transformer_jax.text.language_model import LanguageModel, load
from transformer_jax.text.save import tokenizer_files, written_as
from transformer_jax.tokenizers.hf_files import load_tokenizer_folder
from transformer_jax.tokenizers.special import with_special_tokens
from transformer_jax.tokenizers.trained import ByteTokenizer, CharTokenizer
from transformer_jax.training.loop import fit

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = ModelConfig(
    vocab_size=258, d_model=14, num_layers=1, num_heads=1, d_ff=19, max_len=61, positions="rope",
    norm="rmsnorm", activation="silu", glu=True, use_bias=False, tie_embeddings=True,
)  # fmt: skip
BOS, EOS = 256, 257
TEXT = "to be or not to be that is the question\n" * 9


generate = cli_generate.main


def special(text: str, i: int) -> dict:
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    return dict(id=i, content=text) | flags


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A small byte-level Llama with <s>; its greedy texts have more than one letter."""
    folder = tmp_path_factory.mktemp("published") / "llama"
    params = parameters(CONFIG, 7)
    files = tokenizer_files(ByteTokenizer(), CONFIG.vocab_size)[0]
    definition = json.loads(files["tokenizer.json"])
    definition["added_tokens"] = [special("<s>", BOS), special("</s>", EOS)]
    definition["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}},
    }  # fmt: skip
    beside = dict(
        bos_token="<s>", eos_token="</s>", tokenizer_class="PreTrainedTokenizerFast",
        chat_template="{% for m in messages %}[{{ m.content }}]{% endfor %}",
    )  # fmt: skip
    files |= {
        "tokenizer.json": json.dumps(definition).encode(),
        "tokenizer_config.json": json.dumps(beside).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [EOS]}).encode(),
    }
    save_pretrained(folder, CONFIG, params, files=files)
    return folder


def greedy(folder: Path, ids: list[int], count: int) -> list[int]:
    """Greedy tokens, each from a full pass over the previous ones."""
    config, params = load_pretrained(folder)
    apply = jax.jit(lambda tokens: build(config).apply({"params": params}, tokens)[0])
    seen = list(ids)
    for _ in range(count):
        padded = np.zeros((1, 40), np.int32)
        padded[0, : len(seen)] = seen
        seen.append(int(np.argmax(np.asarray(apply(jnp.asarray(padded)))[0, len(seen) - 1])))
    return seen[len(ids) :]


def written(capsys, *argv: str) -> str:
    status = generate([str(word) for word in argv])
    out, err = capsys.readouterr()
    assert status == 0, err
    return out


def spelled(ids: list[int]) -> str:
    return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def with_stop(folder: Path, to: Path, *ids: int) -> Path:
    shutil.copytree(folder, to)
    (to / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ids)}))
    return to


@pytest.mark.slow
def test_published_decoder_continues_text_after_bos(capsys, published, tmp_path):
    expected = greedy(published, [BOS, *b"to be"], 9)
    assert len(set(expected)) > 3 and max(expected) < BOS
    assert expected != greedy(published, [*b"to be"], 9), "nothing would tell <s>"
    base = ["--prompt", "to be", "--num-tokens", 9, "--temperature", 0]
    assert written(capsys, "--model", published, *base) == f"to be{spelled(expected)}\n"
    last = next(n for n, i in enumerate(expected) if n > 2 and i not in expected[:n])
    ended = with_stop(published, tmp_path / "ended", EOS, expected[last])
    cut = spelled(expected[:last])
    assert written(capsys, "--model", ended, *base) == f"to be{cut}\n"
    base[-2:] = ["--beams", "1"]
    assert written(capsys, "--model", ended, *base).split("\n", 1)[1] == f"to be{cut}\n"
    words = dict(eos_token_id=EOS, bad_words_ids=[expected[:1], [EOS], expected[1:4]])
    (ended / "generation_config.json").write_text(json.dumps(words))
    other = written(capsys, "--model", ended, *base[:-2], "--temperature", 0)
    assert len(other) > len("to be\n") and not other.startswith(f"to be{spelled(expected[:1])}")
    (ended / "generation_config.json").write_text('{"max_length": 20}')
    content = json.loads((ended / "config.json").read_text()) | {"eos_token_id": expected[last]}
    (ended / "config.json").write_text(json.dumps(content))
    assert load_text_model(ended).stop_ids == (expected[last],)


@pytest.mark.slow_except("words1-meant1", "words3-meant3")
@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ([], ()), ([[5], [7]], (Ban(5, 7),)), ([[5], [3, 4, 4]], (Ban(5), BanSequences((3, 4, 4)))),
        ([[3, 4], [EOS]], (BanSequences((3, 4)),)),
    ],
)  # fmt: skip
def test_bad_words_listed_in_folder_are_not_generated(published, tmp_path, words, meant):
    shutil.copytree(published, tmp_path / "model")
    beside = tmp_path / "model" / "generation_config.json"
    beside.write_text(json.dumps({"bad_words_ids": words, "eos_token_id": [EOS]}))
    assert load_text_model(tmp_path / "model").processors == meant
    also = {"bad_words_ids": words, "suppress_tokens": [11, 5], "eos_token_id": [EOS]}
    beside.write_text(json.dumps(also))
    banned = next(p for p in load_text_model(tmp_path / "model").processors if type(p) is Ban)
    assert {11, 5} <= {*banned.tokens} and len({*banned.tokens}) == len(banned.tokens)
    beside.write_text(json.dumps({"begin_suppress_tokens": [3]}))
    with pytest.raises(
        ConfigError, match=r"begin_suppress_tokens is \[3\]: bans for a single step"
    ):
        load_text_model(tmp_path / "model")
    for wrong, rule in (
        ([[]], "a list of lists of IDs"),
        ([5], "a list of lists of IDs"),
        ([[5, 999]], "IDs below vocab"),
    ):
        beside.write_text(json.dumps({"bad_words_ids": wrong}))
        with pytest.raises(ConfigError, match=f"bad_words_ids is .*: must be {rule}"):
            load_text_model(tmp_path / "model")


def test_published_model_loads_in_another_dtype_and_with_another_length(published):
    usual, changes = load_text_model(published).config, dict(dtype="bfloat16", max_len=17)
    wanted = dataclasses.replace(usual, **changes)
    assert load_text_model(published, **changes).config == wanted != usual


@pytest.mark.slow
def test_chat_prompt_uses_chat_template(capsys, published):
    expected = greedy(published, [*b"[be]"], 5)
    assert expected != greedy(published, [BOS, *b"[be]"], 5)
    chat = ["--chat", "--prompt", "be", "--num-tokens", 5, "--temperature", 0]
    answer = spelled(expected).removeprefix(" ")
    assert written(capsys, "--model", published, *chat) == f"{answer}\n"
    model = load(published)
    assert model.chat("be", 5) == answer == "".join(model.chat("be", 5, stream=True))
    with pytest.raises(ValueError, match="contains '<s>', which is a reserved token"):
        model.chat("a<s>")


@pytest.mark.slow
def test_output_satisfies_schema_regex_or_grammar(capsys, published, tmp_path):
    """One text, several samples, a chat answer, and each line of a file."""
    pytest.importorskip("llguidance")
    (tmp_path / "schema").write_text(
        '{"type": "array", "items": {"enum": [1, "é"]}, "maxItems": 2}'
    )
    (tmp_path / "grammar").write_text('start: "(" start ")" | "é"')
    (tmp_path / "lines").write_text("be\nor\n")
    base = ["--model", published, "--num-tokens", 50]
    got = written(capsys, *base, "--prompt", "be", "--schema", tmp_path / "schema")
    assert got.startswith("be[") and set(json.loads(got[2:])) <= {1, "é"}
    chat = ["--chat", "--prompt", "be", "--regex", " [ab]{3}", "--samples", 2, "--seed", 1]
    assert re.fullmatch("(--- [12]\n [ab]{3}\n){2}", written(capsys, *base, *chat))
    lines = ["--prompts", tmp_path / "lines", "--grammar", tmp_path / "grammar"]
    lines += ["--temperature", 0]
    assert re.fullmatch(r"--- 1\nbe\(*é?\)*\n--- 2\nor\(*é?\)*\n", written(capsys, *base, *lines))


@pytest.mark.parametrize(
    ("argv", "message", "status"),
    [
        ("--model {run} --dtype float16", "dtype is 'float16': must be None for a run, which", 2),
        ("--model {run} --max-len 9", "max_len is 9: must be None for a run, which has its own", 2),
        ("--model x --checkpoint best", "checkpoint is 'best': 'x' is not a run; only a", 2),
        ("--model /nonexistent", "'/nonexistent': must be an existing folder", 1),
        ("--model x --regex a --schema b", "pass only one of schema and regex", 2),
        ("--model x --grammar /nonexistent", "/nonexistent", 1),
        ("--model {model} --prompt a --regex (", "regex: unclosed group", 2),
        ("--model {bare} --prompt a", "no usable tokenizer: ", 1),
        ("--model {model} --prompt a --samples 2 --num-tokens 99",
         "tokens is 99: at most 60 fit after the prompt", 2),
        (f"--model {{model}} --chat --prompt {'a' * 60}", "no new token fits after them", 2),
        ("--model {model} --max-len 0", "max_len is 0: must be a positive integer", 2),
        ("--model {model} --chat --prompt a<s>", "contains '<s>', which is a reserved token", 2),
    ],
)  # fmt: skip
def test_invalid_option_raises_one_line_error(capsys, published, tmp_path, argv, message, status):
    bare = tmp_path / "bare"
    if "{bare}" in argv:
        shutil.copytree(published, bare)
        (bare / "tokenizer.json").unlink()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    names = dict(bare=bare, model=published, run=tmp_path / "run")
    assert generate(argv.format(**names).split()) == status
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1), err
    assert message in err


@pytest.mark.parametrize("error", [KeyError("wte.weight"), RuntimeError("Out of\nmemory")])
def test_every_error_type_prints_one_line(capsys, published, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(language_model, "load_text_model", fail)
    assert generate(["--model", str(published), "--prompt", "a"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and " ".join(str(error).split()) in err
    assert ("KeyError: 'wte.weight' (--debug shows the traceback)" in err) == isinstance(
        error, KeyError
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT)
    return file


def flags(published: Path, text: Path, out: Path, *more: str) -> list[str]:
    numbers = "--steps 4 --batch-size 2 --context 7 --eval-every 2 --eval-batches 1 --log-every 1"
    rest = "--sample-tokens 0 --warmup-steps 1 --checkpoint-every 2 --learning-rate 0.01"
    places = ["--init-from", str(published), "--data", str(text), "--out", str(out)]
    return [*places, *f"{numbers} {rest}".split(), *more]


@pytest.fixture(scope="module")
def tuned(published, text, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("tuned") / "run"
    assert train.main(flags(published, text, out)) == 0
    return out


@pytest.mark.slow
def test_fine_tuning_starts_from_published_parameters(published, text, tuned):
    """The first loss equals that of the published model on the same windows."""
    from transformer_jax.checkpoints.run_folder import RunFolder
    from transformer_jax.training.data import load_dataset, random_starts

    config = RunFolder(tuned).read_config()
    assert (config.init_from, config.tokenizer) == (str(published), "pretrained")
    assert dataclasses.replace(config.model, dtype="float32") == pretrained_config(published)
    dataset = load_dataset(config, load_tokenizer_folder(published))
    starts = random_starts(config.seed, 0, (1, 2), len(dataset.train) - 7)[0]
    windows = np.stack([dataset.train[s : s + 8] for s in starts]).astype(np.int32)
    params = load_pretrained(published)[1]
    logits = np.asarray(build(CONFIG).apply({"params": params}, windows[:, :-1])[0], np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    loss = -np.take_along_axis(log_probs, windows[:, 1:, None], -1).mean()
    first, *_, last = RunFolder(tuned).read_metrics()
    assert abs(first["loss"] - loss) < 1e-5
    assert last["loss"] < first["loss"] - 0.1


@pytest.mark.slow
def test_fine_tuned_run_resumes_bitwise_without_published_folder(published, text, tuned, tmp_path):
    folder = Path(shutil.copytree(published, tmp_path / "gone"))
    config, _ = configure(parse(flags(folder, text, tmp_path / "run"), None))
    stops = iter([False, True])
    assert fit(config, stop=lambda: next(stops)).interrupted
    shutil.rmtree(folder)
    assert train.main(["--resume", "--out", str(tmp_path / "run")]) == 0
    one, two = (load_run(run, "last").params for run in (tuned, tmp_path / "run"))
    jax.tree.map(np.testing.assert_array_equal, one, two)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--d-model 28", "d_model is 28: must be 14, as in {model}"),
        ("--base 5e5", "base is 500000.0: must be 10000.0, as in {model}"),
        ("--vocab-size 300", "vocab_size is 300: must be 258, as in {model}"),
        ("--tokenizer char", "tokenizer is 'char': must be 'pretrained'"),
        ("--preset tiny", "preset cannot be used with init_from"),
        ("--context 62", "context is 62: must be at most the model's max_len, 61"),
    ],
)
def test_fields_that_contradict_published_model_are_rejected(
    capsys, published, text, tmp_path, more, message
):
    assert train.main(flags(published, text, tmp_path / "run", *more.split())) == 2
    assert message.format(model=published) in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def dropping(published, tmp_path_factory) -> Path:
    """The same model with dropout in config.json."""
    folder = tmp_path_factory.mktemp("dropping") / "llama"
    shutil.copytree(published, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(attention_dropout=0.5)))
    return folder


@pytest.mark.parametrize(
    ("more", "rates"),
    [
        ("", (0.0, 0.5)), ("--dropout 0", (0.0, 0.0)), ("--dropout 0.25", (0.25, 0.5)),
        ("--dropout 0 --attention-dropout 0.25", (0.0, 0.25)), ("--task preference", (0.0, 0.0)),
        ("--task preference --attention-dropout 0.25", (0.0, 0.25)),
    ],
)  # fmt: skip
def test_dropout_is_set_by_model_task_and_flags(dropping, text, tmp_path, more, rates):
    config, _ = configure(parse(flags(dropping, text, tmp_path, *more.split()), None))
    assert (config.model.dropout, config.model.attention_dropout) == rates


def test_dropout_zero_disables_preset_dropout():
    config, _ = configure(parse("--preset gpt2 --data x --dropout 0".split(), None))
    assert config.model.attention_dropout == config.model.dropout == 0


@pytest.mark.slow
def test_preference_loss_starts_at_log_2_despite_configured_dropout(dropping, tmp_path, capsys):
    data = tmp_path / "pairs.jsonl"
    data.write_text('{"prompt": "ab", "chosen": "cde", "rejected": "fg"}\n' * 3)
    more = ["--val-data", str(data), "--task", "preference"]
    first = []
    for number, rate in enumerate(([], ["--attention-dropout", "0.5"])):
        out = tmp_path / f"run{number}"
        assert train.main([*flags(dropping, data, out, *more, *rate), "--steps", "1"]) == 0
        first.append(json.loads((out / "metrics.jsonl").read_text().splitlines()[0])["loss"])
        note = "attention_dropout is 0.5: the reference model has none"
        assert (note in "".join(capsys.readouterr())) == bool(rate)
    assert abs(first[0] - np.log(2)) < 1e-6 < 1e-4 < abs(first[1] - np.log(2))


def test_execution_options_may_differ_from_published_model(published, text, tmp_path):
    more = "--dropout 0.1 --remat dots --scan-layers True --dtype bfloat16"
    config, _ = configure(parse(flags(published, text, tmp_path, *more.split()), None))
    model = config.model
    assert (model.dropout, model.remat, model.scan_layers) == (0.1, "dots", True)
    assert model.dtype == "bfloat16"
    other = dataclasses.replace(model, norm_eps=1e-3)
    wrong = dataclasses.replace(config, model=other, out=str(tmp_path / "x"))
    with pytest.raises(ConfigError, match=r"norm_eps is 0\.001, but .* has 1e-05"):
        fit(wrong)
    assert fine_tuning(CONFIG, "x").tokenizer == "pretrained"


def test_text_with_ids_outside_vocabulary_is_rejected(capsys, published, tmp_path):
    folder = Path(shutil.copytree(published, tmp_path / "more"))
    definition = json.loads((folder / "tokenizer.json").read_text())
    definition["added_tokens"].append(special("<new>", 258))
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    (tmp_path / "text.txt").write_text(TEXT + "<new>")
    assert train.main(flags(folder, tmp_path / "text.txt", tmp_path / "run")) == 2
    assert "it contains token 258" in capsys.readouterr().err
    assert generate(["--model", str(folder), "--prompt", "<new>"]) == 2
    assert (
        "the prompt contains ID 258, but the model has only 258 tokens" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_converted_run_generates_same_text(capsys, published, tuned, tmp_path):
    base = ["--prompt", "to be", "--num-tokens", 9, "--temperature", 0]
    from_run = written(capsys, "--model", tuned, "--checkpoint", "last", *base)
    to = tmp_path / "made"
    argv = ["--model", str(tuned), "--checkpoint", "last", "--to", str(to)]
    assert convert(argv) == 0
    assert "as a llama" in capsys.readouterr().out
    assert written(capsys, "--model", to, *base) == from_run
    config, params = load_pretrained(to)
    assert config == pretrained_config(published)
    jax.tree.map(np.testing.assert_array_equal, params, load_run(tuned, "last").params)
    before, after = (load_text_model(folder) for folder in (published, to))
    assert (after.stop_ids, after.tokenizer) == (before.stop_ids, before.tokenizer)
    content = json.loads((to / "config.json").read_text())
    assert [content[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [BOS, EOS, None]
    assert convert(argv) == 2
    assert "must be new or empty" in capsys.readouterr().err
    argv[-1] = str(tmp_path / "gemma")
    assert convert([*argv, "--family", "gemma"]) == 2
    assert "in the family gemma" in capsys.readouterr().err and not (tmp_path / "gemma").exists()


def test_published_model_can_be_converted(capsys, published, tmp_path):
    published = Path(shutil.copytree(published, tmp_path / "newer"))
    content = json.loads((published / "config.json").read_text())
    content["dtype"] = content.pop("torch_dtype")  # as in newer folders
    (published / "config.json").write_text(json.dumps(content))
    to = tmp_path / "small"
    argv = ["--model", str(published), "--to", str(to), "--dtype", "bfloat16"]
    assert convert([*argv, "--shard-gb", "1e-6"]) == 0
    assert len(list(to.glob("model-*.safetensors"))) > 1
    content = json.loads((to / "config.json").read_text())
    assert content["dtype"] == "bfloat16" and "torch_dtype" not in content
    config, params = load_pretrained(to)
    assert config.dtype == "bfloat16"
    want = load_pretrained(published, dtype="bfloat16")[1]
    jax.tree.map(np.testing.assert_array_equal, params, want)
    assert (to / "tokenizer.json").read_bytes() == (published / "tokenizer.json").read_bytes()
    again = tmp_path / "again"
    (line,) = load(published).save(again, dtype="bfloat16", shard_bytes=1000)
    assert line.startswith(f"{again}: ") and line.endswith("parameters in bfloat16")
    assert {f.name for f in again.iterdir()} == {f.name for f in to.iterdir()}
    for name in (f.name for f in to.iterdir() if f.suffix == ".safetensors"):
        assert (again / name).read_bytes() == (to / name).read_bytes(), name
    argv[3] = str(tmp_path / "x")
    assert convert([*argv, "--family", "llama"]) == 2
    assert "family is 'llama': " in capsys.readouterr().err
    (tmp_path / "secret").write_text("secret")
    linked = Path(shutil.copytree(published, tmp_path / "linked"))
    (linked / "merges.txt").symlink_to(tmp_path / "secret")
    assert convert(["--model", str(linked), "--to", str(tmp_path / "y")]) == 1
    assert "a link that leaves the folder" in capsys.readouterr().err


@pytest.mark.slow_except("tokenizer0")
@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer.train("héllo wörld\n")])
def test_saved_run_tokenizer_can_be_loaded(tokenizer, tmp_path):
    from tokenizers import Tokenizer

    files, note = tokenizer_files(tokenizer, tokenizer.vocab_size)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    text, ids = "hélloö \n world", tokenizer.encode("hélloö \n world").tolist()
    loaded = load_tokenizer_folder(tmp_path)
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert loaded.encode(text).tolist() == library.encode(text).ids == ids
    assert loaded.decode(ids) == library.decode(ids) == text
    unknown = isinstance(tokenizer, CharTokenizer)
    assert loaded.vocab_size == tokenizer.vocab_size + unknown and "merges" in note
    if unknown:
        assert loaded.encode("hx").tolist() == [*tokenizer.encode("h"), tokenizer.vocab_size]


@pytest.mark.slow
def test_unseen_character_is_rejected_despite_larger_model_vocabulary(tmp_path):
    """A model with 100 tokens trained on 10 characters: row 10 exists but has no character."""
    tokenizer = CharTokenizer.train("héllo wörld\n")
    files, note = tokenizer_files(tokenizer, 100)
    assert "any other character gets ID 100, which the model does not have" in note
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    loaded = load_tokenizer_folder(tmp_path)
    assert loaded.encode("hx").tolist() == [*tokenizer.encode("h"), 100]
    assert loaded.decode(tokenizer.encode("hold")) == "hold"


def test_qwen2_can_be_saved_only_with_qwen_tokenizer(tmp_path):
    from transformer_jax.pretrained.save import check_tokenizer
    from transformer_jax.tokenizers.gguf_metadata import QWEN2_SPLIT

    definition = tokenizer_files(ByteTokenizer(), 256)[0]["tokenizer.json"]
    check_tokenizer("llama", definition)
    config = dataclasses.replace(CONFIG, qkv_bias=True)
    with pytest.raises(ConfigError, match="transformers always splits text like Qwen 2"):
        files = {"tokenizer.json": definition}
        save_pretrained(tmp_path / "x", config, parameters(config, 7), family="qwen2", files=files)
    content = json.loads(definition) | dict(normalizer=dict(type="NFC"))
    split = dict(type="Split", pattern={"Regex": QWEN2_SPLIT}, behavior="Isolated", invert=False)
    letters = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
    content["pre_tokenizer"] = dict(type="Sequence", pretokenizers=[split, letters])
    check_tokenizer("qwen2", json.dumps(content).encode())
    content["normalizer"] = None
    with pytest.raises(ConfigError, match="save in the family llama"):
        check_tokenizer("qwen2", json.dumps(content).encode())


def stand_in(monkeypatch, load_run):
    """Make every path a run whose model is `load_run()`."""

    def loaded(*given, **named):
        model = load_run(*given, **named)
        return dataclasses.replace(model, run=model.run or TrainConfig(model=model.config))

    for module in (loading, language_model):
        monkeypatch.setattr(module, "is_run", lambda path: True)
        monkeypatch.setattr(module, "load_run", loaded)


@pytest.mark.slow
def test_qkv_biases_are_saved_with_other_tokenizers(capsys, monkeypatch, tmp_path):
    """Saved as a llama, because transformers always uses Qwen 2's text splitting for a qwen2."""
    config = dataclasses.replace(CONFIG, qkv_bias=True, vocab_size=256)
    run = TextModel(config, parameters(config, 7), ByteTokenizer())
    runs = {
        "plain": run,
        "windows": dataclasses.replace(run, config=dataclasses.replace(config, window=3)),
    }
    stand_in(monkeypatch, lambda path, *_, **__: runs[str(path)])
    argv = ["--model", "plain", "--to", str(tmp_path / "made")]
    assert convert(argv) == 0
    assert (
        "as a llama\nthe family llama has biases, which are written as zeros"
        in capsys.readouterr().out
    )
    found, params = load_pretrained(tmp_path / "made")
    one, two = (
        build(c).apply({"params": p}, jnp.arange(11)[None])[0]
        for c, p in ((found, params), (config, run.params))
    )
    np.testing.assert_array_equal(one, two)
    assert convert([*argv[:3], str(tmp_path / "x"), "--family", "qwen2"]) == 2
    assert "transformers always splits text like Qwen 2" in capsys.readouterr().err
    assert convert(["--model", "windows", "--to", str(tmp_path / "windows")]) == 0
    assert "as a smollm3" in capsys.readouterr().out  # a llama has no windows


def test_named_template_tokens_are_saved(published, tmp_path):
    beside = json.loads((published / "tokenizer_config.json").read_text())
    beside["extra_special_tokens"] = {"tool_token": "<s>"}
    beside["chat_template"] = "{{ tool_token }}{{ messages[0].content }}"
    shutil.copytree(published, tmp_path / "m")
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps(beside))
    tokenizer = load_tokenizer_folder(tmp_path / "m")
    files, _ = tokenizer_files(tokenizer, CONFIG.vocab_size)
    (tmp_path / "m" / "tokenizer_config.json").write_bytes(files["tokenizer_config.json"])
    again = load_tokenizer_folder(tmp_path / "m")
    chat = [{"role": "user", "content": "hi"}]
    assert again.chat(chat) == tokenizer.chat(chat) == "<s>hi"


def test_untied_encoder_decoder_with_shared_input_is_rejected(tmp_path):
    """Transformers has one table for each side if the output is untied."""
    config = ModelConfig(
        kind="encoder-decoder", vocab_size=13, d_model=14, num_heads=2, num_layers=1, max_len=11,
        positions=Learned(offset=2), norm_order="post", embedding_norm=True, tie_embeddings=False,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"source_vocab_size is None: .* bart in transformers"):
        written_as(config, None)
    with pytest.raises(ConfigError, match=r"source_vocab_size is None: .* bart in transformers"):
        save_pretrained(tmp_path / "saved", config, drawn(config))
    assert not (tmp_path / "saved").exists()
    assert written_as(dataclasses.replace(config, source_vocab_size=13), None)[0] == "bart"


@pytest.mark.slow
def test_run_without_biases_is_saved_with_zeros(capsys, monkeypatch, key, tmp_path):
    config = ModelConfig(
        vocab_size=13, d_model=14, num_heads=2, num_layers=1, max_len=11, use_bias=False
    )
    run = TextModel(config, init_params(config, key), CharTokenizer("abcdefghijklm"))
    stand_in(monkeypatch, lambda path, *_, **__: run)
    assert convert(["--model", "any", "--to", str(tmp_path / "made")]) == 0
    printed = capsys.readouterr().out
    assert (
        "the family gpt2 has biases, which are written as zeros" in printed
        and "13 characters" in printed
    )
    found, params = load_pretrained(tmp_path / "made")
    assert found.use_bias
    content = json.loads((tmp_path / "made" / "config.json").read_text())
    assert content["eos_token_id"] is None  # the default of a gpt2 is 50256
    tokens = np.arange(11, dtype=np.int32)[None]
    one, two = (
        build(c).apply({"params": p}, tokens)[0] for c, p in ((found, params), (config, run.params))
    )
    np.testing.assert_array_equal(one, two)
    assert convert(["--model", "any", "--to", str(tmp_path / "x"), "--family", "llama"]) == 2
    assert "the family llama" in capsys.readouterr().err


@pytest.mark.slow
def test_encoder_decoder_generates_from_source(key):
    config = ModelConfig(
        kind="encoder-decoder", vocab_size=13, d_model=14, num_heads=2, num_layers=1, d_ff=17,
        max_len=19, positions="learned",
        tie_embeddings=False,
    )  # fmt: skip
    params = parameters(config, 54)
    tokenizer = with_special_tokens(CharTokenizer("abcdefghijk"), ["bos", "eos"])
    source = tokenizer.encode("dbebf")
    apply = jax.jit(
        lambda tokens: build(config).apply({"params": params}, tokens, source=source[None])[0]
    )
    seen = [11]
    for _ in range(7):
        padded = np.zeros((1, 11), np.int32)
        padded[0, : len(seen)] = seen
        seen.append(int(np.argmax(np.asarray(apply(padded))[0, len(seen) - 1])))
    assert len(set(seen)) > 3
    assert max(seen[1:]) < 11, "they are letters"
    expected = tokenizer.decode(seen[1:])
    published = TextModel(config, params, tokenizer)
    model = LanguageModel(published, "here")
    ended = dict(processors=(ForceLast(7, 6),))
    assert model.generate("dbebf", 7, **ended) == expected[:6] + "g"
    assert model.generate("dbebf", 7, stop=expected[2:4], **ended) == expected[:2]
    ((_, found),) = model.search("dbebf", 7, beams=1)
    assert found == expected
    last = next(n for n, i in enumerate(seen[1:]) if n > 2 and i not in seen[1 : n + 1])
    cut = LanguageModel(dataclasses.replace(published, stop_ids=(seen[last + 1],)), "here")
    drawn = dict(sampler=Sample(Temperature(0.0)), key=key, samples=2)
    assert cut.generate("dbebf", 7, **drawn) == [expected[:last]] * 2
    nan = jax.tree.map(lambda leaf: leaf * np.nan, params)
    nonfinite = LanguageModel(dataclasses.replace(published, params=nan), "here")
    for ask in (nonfinite.generate, lambda *given: nonfinite.search(*given, beams=1)):
        with pytest.raises(ValueError, match="no token can follow"):
            ask("dbebf", 7)
