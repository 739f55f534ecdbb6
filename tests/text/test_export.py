"""An exported folder decodes without this package, with the same tokens as `generate`."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax as tj
from tests.support.compilation import quick_environment
from transformer_jax.__main__ import main as command
from transformer_jax.config import ConfigError
from transformer_jax.text import decode_exported
from transformer_jax.text.export import export_decoder

pytest.importorskip("flatbuffers", reason="jax.export serialises with it")

pytestmark = pytest.mark.usefixtures("quick_compilation")

SIZES = dict(
    vocab_size=61, d_model=24, num_heads=4, num_layers=2, d_ff=40, max_len=97, init_std=0.3
)
LLAMA = dict(
    num_kv_heads=2, positions="rope", norm="rmsnorm", activation="silu", glu=True, use_bias=False
)
CONFIGS = {
    "gpt2": tj.ModelConfig(**SIZES, positions="learned"),
    "llama": tj.ModelConfig(**SIZES, **LLAMA),
    "llama in bfloat16": tj.ModelConfig(**SIZES, **LLAMA, dtype="bfloat16"),
    "gpt2 in bfloat16": tj.ModelConfig(**SIZES, positions="learned", dtype="bfloat16"),
    "ring with sinks": tj.ModelConfig(**SIZES, positions="rope", window=5, sink_tokens=2),
    "scanned, windows by layer": tj.ModelConfig(**SIZES, positions="alibi", scan_layers=True),
    "gru": tj.RecurrentConfig(vocab_size=61, d_embed=7, d_hidden=11, cell="gru"),
}
PROMPTS = [[5, 7, 11, 2, 3, 13, 17], [19, 23, 29, 31], [37]]
NEW = 64

ELSEWHERE = """
import json, runpy, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformer_jax", "flax"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
folder, batches, count = json.loads(sys.argv[1])
decode = runpy.run_path(folder + "/decode.py")["decode"]
print(json.dumps([decode(folder, prompts, count) for prompts in batches]))
assert not {"transformer_jax", "flax"} & {name.split(".")[0] for name in sys.modules}
"""


def made(name):
    config = CONFIGS[name]
    dtype = getattr(config, "dtype", jnp.float32)
    params = tj.init_params(config, jax.random.key(0))
    return config, jax.tree.map(lambda x: x.astype(dtype), params)


def decoded_elsewhere(folder, batches, count=NEW):
    """Decode in a process that cannot import this package."""
    arguments = json.dumps([str(folder), batches, count])
    done = subprocess.run(
        [sys.executable, "-I", "-c", ELSEWHERE, arguments], capture_output=True, text=True,
        timeout=250, env=quick_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def generated(config, params, prompts, context, count=NEW, **more):
    rows = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    state = tj.init_decode_state(config, None, len(prompts), context)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    step = tj.make_step(tj.build(config))
    out = tj.generate(step, params, rows, state, num_tokens=count, lengths=lengths, **more)
    return [row.tolist() for row in out.rows()]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_exported_folder_decodes_any_batch_without_package(name, tmp_path):
    """One prompt, and three of different lengths, decode from one set of files."""
    config, params = made(name)
    export_decoder(tmp_path / "out", config, params, context=71)
    found = decoded_elsewhere(tmp_path / "out", [PROMPTS[:1], PROMPTS])
    if "bfloat16" in name:  # rounding depends on the implementation of attention
        config = dataclasses.replace(config, implementation="xla")
    want = [generated(config, params, prompts, 71) for prompts in (PROMPTS[:1], PROMPTS)]
    assert found == want
    assert (
        len({token for row in want[1] for token in row}) > 5
    )  # or the comparison would be trivial
    files = {file.name: file.stat().st_size for file in (tmp_path / "out").iterdir()}
    assert {*files} == {"config.json", "decode.py", "model.safetensors", "prefill.jax", "step.jax"}


def test_decode_matches_generate_for_several_prompts(tmp_path):
    config, params = made("gru")
    export_decoder(tmp_path / "out", config, params, context=71)
    prompts = [*PROMPTS, [0, 60]]  # the first id and the last one
    found = decode_exported.decode(tmp_path / "out", prompts, 11)
    assert found == generated(config, params, prompts, 71, 11)
    assert len({token for row in found for token in row}) > 5


@pytest.mark.slow
def test_fixed_batch_export_stops_rows_and_rejects_other_sizes(tmp_path):
    config, params = made("llama")
    stop = generated(config, params, PROMPTS, 71)[0][3]
    export_decoder(tmp_path / "out", config, params, context=71, batch=3, stop=[stop])
    (found,) = decoded_elsewhere(tmp_path / "out", [PROMPTS])
    assert found == generated(config, params, PROMPTS, 71, stop=stop)
    assert len(found[0]) <= 4
    with pytest.raises(ValueError, match="the number of prompts is 2: must be 3"):
        decode_exported.decode(tmp_path / "out", PROMPTS[:2], 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(context=98), "context is 98: must be at most max_len, 97"),
        (dict(context=0), "context is 0: must be an integer of at least 1"),
        (dict(batch=0), "batch is 0: must be an integer of at least 1"),
        (dict(platforms=["cpu", "gpu"]), r"platforms is \['cpu', 'gpu'\]: must be one or more of "),
        (dict(platforms="cpu"), "platforms is 'cpu': must be one or more of cpu, cuda, rocm, tpu"),
        (dict(platforms=[]), r"platforms is \[\]: must be one or more of "),
        (dict(platforms=None), "platforms is None: must be one or more of "),
        (dict(platforms=[["cpu"]]), r"platforms is \[\['cpu'\]\]: must be one or more of "),
        (dict(first=5), "first is 5: must be a list of token IDs"),
        (dict(first=[1, 61]), r"first\[1\] is 61: must be at most 60"),
        (dict(stop=[-1]), r"stop\[0\] is -1: must be an integer of at least 0"),
        (dict(stop=[2.5]), r"stop\[0\] is 2.5: must be an integer of at least 0"),
    ],
)
def test_error_names_invalid_argument(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=f"^{message}"):
        export_decoder(tmp_path / "out", CONFIGS["gpt2"], {}, **arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (tj.ModelConfig(kind="encoder"), "kind is 'encoder'"),
        (tj.ModelConfig(kind="encoder-decoder"), "kind is 'encoder-decoder'"),
        (tj.RecurrentConfig(source_vocab_size=5), "source_vocab_size is 5"),
    ],
)
def test_model_that_cannot_continue_text_is_rejected(config, field, tmp_path):
    with pytest.raises(ConfigError, match=f"^{field}: must be a model that continues text"):
        export_decoder(tmp_path / "out", config, {})


def about(tmp_path, **changes):
    content = (
        dict(
            format=decode_exported.FORMAT, batch=None, context=11, first=[], stop=[], vocab_size=61
        )
        | changes
    )
    (tmp_path / "config.json").write_text(json.dumps(content))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "prompts", "count", "message"),
    [
        (dict(format="transformer_jax export 9"), [[1]], 1, "format is '.* 9': must be '.* 1'"),
        (dict(format=None), [[1]], 1, "format is None: must be "),
        ({}, [[1], []], 1, "a prompt has no tokens: must have at least one"),
        ({}, [], 1, "a prompt has no tokens: must have at least one"),
        ({}, [[1]], 0, "number of new tokens is 0: must be an integer of at least 1"),
        ({}, [[1]], 2.5, "number of new tokens is 2.5: must be an integer of at least 1"),
        ({}, [5, 6], 1, "a prompt is 5: must be a list of token IDs"),
        ({}, ["56"], 1, "a prompt is '56': must be a list of token IDs"),
        (
            {},
            [[1, 2, 3]],
            10,
            "prompt and new tokens reach length 12: the limit is the context, 11",
        ),
        (dict(batch=2), [[1]], 1, "the number of prompts is 1: must be 2"),
        ({}, [[1], [5, 61]], 1, "a prompt contains the token 61: must be an ID from 0 to 60"),
        ({}, [[-1]], 1, "a prompt contains the token -1: must be an ID from 0 to 60"),
        ({}, [[2**40]], 1, f"a prompt contains the token {2**40}: must be an ID from 0 to 60"),
        ({}, [[1.5]], 1, "a prompt contains the token 1.5: must be an ID from 0 to 60"),
    ],
)
def test_exported_script_reports_invalid_arguments(changes, prompts, count, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        decode_exported.decode(about(tmp_path, **changes), prompts, count)


def test_exported_script_writes_no_token_after_nan(tmp_path, monkeypatch):
    def programs(folder):
        logits = jnp.zeros((2, 1000)).at[:, 7].set(1.0).at[1, 5].set(2.0)
        broken = logits.at[1, 3].set(jnp.nan)  # in the second row, at the second token
        return lambda *args: (logits, ()), lambda *args: (broken, ())

    monkeypatch.setattr(decode_exported, "load_programs", programs)
    folder = about(tmp_path, vocab_size=1000)
    assert decode_exported.decode(folder, [[1], [2]], 1) == [[7], [5]]
    with pytest.raises(ValueError, match="prompt 1: the largest logit of a next token is not fin"):
        decode_exported.decode(folder, [[1], [2]], 2)
    folder = about(tmp_path, vocab_size=1000, stop=[5])  # the second row has ended
    assert decode_exported.decode(folder, [[1], [2]], 2) == [[7, 7], [5]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "[]", "config.json: format is []: must be '"),
        ("config.json", "{", "config.json cannot be read: Expecting property name"),
        ("config.json", json.dumps({"format": decode_exported.FORMAT, "batch": None}),
         "config.json is missing context, first, stop, vocab_size"),
        ("model.safetensors", "torn", "model.safetensors cannot be read: "),
        ("prefill.jax", "torn", "prefill.jax cannot be read: "),
    ],
)  # fmt: skip
def test_error_names_damaged_file(name, content, message, tmp_path):
    about(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError) as caught:
        decode_exported.decode(tmp_path, [[1]], 1)
    assert f"{tmp_path}/{message}" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("Once", "decode.py: a prompt is 'Once': must be token IDs, such as 12,5,9: the folder "
                 "has no tokenizer.json"),
        ("1,,2", "decode.py: a prompt is '1,,2': must be token IDs, such as 12,5,9: the folder "
                 "has no tokenizer.json"),
        ("61", "decode.py: a prompt contains the token 61: must be an ID from 0 to 60"),
    ],
)  # fmt: skip
def test_exported_script_validates_prompt_ids(prompt, error, tmp_path):
    script = about(tmp_path) / "decode.py"
    script.write_bytes(Path(decode_exported.__file__).read_bytes())
    done = subprocess.run(
        [sys.executable, "-I", str(script), prompt], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{error}\n")


@pytest.mark.slow
def test_export_command_writes_script_that_accepts_text(tmp_path, capsys):
    from transformer_jax.training import fit

    text = tmp_path / "text.txt"
    text.write_text("one potato, two potato, three potato, four.\n" * 20)
    model = tj.ModelConfig(d_model=32, num_layers=1, num_heads=2, max_len=64, positions="rope")
    run = dict(steps=20, eval_every=20, learning_rate=1e-2, sample_tokens=0)
    fit(tj.TrainConfig(data=str(text), out=str(tmp_path / "run"), model=model, **run))
    out = str(tmp_path / "out")
    capsys.readouterr()
    assert command(["export", "--model", str(tmp_path / "run"), "--to", out]) == 0
    assert (
        capsys.readouterr().out == f"{out}: written; to decode: python {out}/decode.py 'a text'\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", f"{out}/decode.py", "one pot", "two ", "--num-tokens", "24"],
        capture_output=True, text=True, timeout=250, env=quick_environment(),
    )  # fmt: skip
    loaded = tj.load(tmp_path / "run")
    want = "".join(f"{loaded.generate(prompt, 24)}\n" for prompt in ("one pot", "two "))
    assert (done.stdout, done.stderr) == (want, "")
    done = subprocess.run(
        [sys.executable, "-I", f"{out}/decode.py", "one"],
        capture_output=True, text=True, timeout=250, env=quick_environment(),
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (f"{loaded.generate('one', 62)}\n", "")  # as many as fit
    done = subprocess.run(
        [sys.executable, "-I", f"{out}/decode.py", "one", "--num-tokens", "64"],
        capture_output=True, text=True, timeout=250, env=quick_environment(),
    )  # fmt: skip
    error = "decode.py: prompt and new tokens reach length 66: the limit is the context, 64\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", error)
