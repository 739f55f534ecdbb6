"""Write `old_runs`: run folders, checkpoints and configs of the library before its positions became
one value of `ModelConfig`.

    PYTHONPATH=PLACE python write_old_runs.py

where PLACE holds `train.py` and `transformer_jax` of commit 0ac0239, the last before the change. It
was run there, with Python 3.11, jax and jaxlib 0.10.2, flax 0.12.8, optax 0.2.8, numpy 2.4.6 and
tokenizers 0.23.3, on a CPU in float32, and does not run with what came later: it stays to tell what
the files are, which `tests/checkpoints/test_old_runs.py` reads with the library of its day.

    text.txt           what every run was trained on
    RUN/               five runs of the command `train.py`, without loss.png
    lora/              adapters of the run `pretrained_llama3`, by `save_lora`
    params/MODEL/      parameters of models that no run trains, `filled`, by `checkpoint.save`
    expected.json      of the runs, logits, texts, and the losses of the next steps; of the
                       adapters, their config and the logits
    old_configs.json   configs as run folders hold them, what they have of parameters, and logits
                       after all of `tokens`: of parameters `filled` by NumPy, which needs no
                       compiler, and of some models of those that `init_params` gives for key 0

In old_configs.json a config stands as the fields that differ from `defaults`, which has them all:
both together are what `config_to_json` wrote.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

import train
from transformer_jax import (
    PRESETS,
    LoraConfig,
    ModelConfig,
    RecurrentConfig,
    RopeConfig,
    TrainConfig,
    apply_lora,
    build,
    checkpoint,
    init_lora,
    init_params,
    load_lora,
    num_params,
    progress,
    save_lora,
    save_pretrained,
    tensor_names,
    train_preset,
)
from transformer_jax.config import ConfigError
from transformer_jax.convert import tokenizer_files
from transformer_jax.data import ByteTokenizer
from transformer_jax.run_folder import RunFolder, config_from_json, config_to_json
from transformer_jax.text_model import load_run

COMMIT = "0ac0239"
OUT = Path(__file__).parent / "old_runs"
LIMIT = 60_000
"""Bytes of a run folder."""

MARGIN = 1e-3
"""Least distance of the likeliest token's logit from the next one's in a recorded text, and of the
logits of two configs: well above what another version of JAX may change."""

COLUMNS = 16
"""How many tokens of a wide vocabulary have their logits written down."""

WORDS = "the cat sat on a mat; le café était déjà fermé — and so the dog ran far away\n".split(" ")

SMALL = "--d-model 8 --num-heads 2 --d-ff 16 --max-len 32 --init-std 0.2"
SHORT = "--eval-every 150 --log-every 50 --keep 1 --sample-tokens 40 --learning-rate 0.02"
SPED = "--min-learning-rate 0.001 --warmup-steps 20 --context 16 --batch-size 4 --data text.txt"
RUNS: dict[str, dict[str, Any]] = {
    # A block as GPT-2's, dropout, micro-batches; the table's first two rows are not position 0.
    "char_learned": dict(
        flags="--num-layers 1 --positions learned --position-offset 2 --dropout 0.1 --steps 300 "
        "--accumulation 2 --label-smoothing 0.05 --seed 3",
        more="--steps 306 --log-every 1", prompt="the cat",
    ),
    # Every field of yarn, two bases, a pattern of windows, a sink.
    "bpe_rope_yarn": dict(
        flags="--num-layers 2 --positions rope --base 500 --head-dim 6 --dims 4 "
        "--pairing interleaved --scaling yarn --factor 2 --original-len 12 --beta-fast 3 "
        "--beta-slow 0.25 --attention-factor 1.25 --truncate False --window 5,none "
        "--window-rope-base 31 --sink-tokens 1 --norm rmsnorm --activation silu --glu True "
        "--use-bias False --num-kv-heads 1 --tokenizer bpe --bpe-vocab-size 270 --steps 300 "
        "--seed 4",
        more="--steps 306 --log-every 1", prompt="le café",
    ),
    # A table of buckets, a scanned stack.
    "byte_t5": dict(
        flags="--num-layers 2 --positions t5 --relative-buckets 8 --relative-max-distance 13 "
        "--scan-layers True --qk-norm True --tokenizer byte --steps 300 --seed 5",
        more="--steps 306 --log-every 1", prompt="so the",
    ),
    # Stopped by a signal, between two evaluations: two checkpoints, the last without a loss.
    "char_alibi": dict(
        flags="--num-layers 1 --positions alibi --norm-order sandwich --tie-embeddings False "
        "--steps 318 --dropout 0.1 --seed 6",
        stop=311, more="--log-every 1", prompt="the dog",
    ),
    # Began with a published model: a tokenizer of the fourth kind, another rotation.
    "pretrained_llama3": dict(
        flags="--init-from published --steps 300 --seed 7",
        more="--steps 306 --log-every 1", prompt="on a",
    ),
}  # fmt: skip

PUBLISHED = ModelConfig(
    vocab_size=258, d_model=8, num_layers=1, num_heads=2, num_kv_heads=1, d_ff=16, max_len=32,
    positions="rope", norm="rmsnorm", activation="silu", glu=True, use_bias=False, init_std=0.2,
    rope=RopeConfig(
        base=100.0, scaling="llama3", factor=3.0, original_len=12, low_freq_factor=1.5,
        high_freq_factor=5.0,
    ),
)  # fmt: skip

TINY = ModelConfig(
    vocab_size=11, d_model=16, num_layers=1, num_heads=2, d_ff=12, max_len=24, init_std=0.5
)
TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]]
SOURCE = [[2, 7, 1, 8, 2, 8, 1, 8, 10]]

YARN = dict(base=50.0, scaling="yarn", factor=4.0, original_len=16)
LONG = dict(
    scaling="longrope", original_len=8, short_factors=(1.0, 1.5, 2.0, 2.5),
    long_factors=(2.0, 3.0, 5.0, 7.0),
)  # fmt: skip
LLAMA3 = dict(base=50.0, scaling="llama3", factor=4.0, original_len=32)
ROPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "base": dict(base=50.0),
    "dims": dict(dims=4),
    "interleaved": dict(pairing="interleaved"),
    "linear": dict(scaling="linear", factor=3.0),
    "ntk": dict(scaling="ntk", factor=3.0),
    "dynamic": dict(scaling="dynamic", factor=3.0, original_len=8, length=20),
    "dynamic at rest": dict(scaling="dynamic", factor=3.0, original_len=8, base=70.0),
    "llama3": LLAMA3,
    "llama3 low": LLAMA3 | dict(low_freq_factor=2.5),
    "llama3 high": LLAMA3 | dict(high_freq_factor=9.0),
    "yarn": YARN,
    "yarn slow": YARN | dict(beta_slow=0.3),
    "yarn untruncated": YARN | dict(beta_slow=0.3, truncate=False),
    "yarn slower": YARN | dict(beta_slow=0.05),
    "yarn fast": YARN | dict(beta_slow=0.05, beta_fast=0.9),
    "yarn attention": YARN | dict(attention_factor=1.5),
    "longrope": LONG | dict(length=24),
    "longrope short": LONG,
    "longrope attention": LONG | dict(length=24, attention_factor=1.5),
    "longrope factor": LONG | dict(length=24, factor=4.0),
}
MODELS: dict[str, dict[str, Any]] = {
    "no positions": dict(positions="none"),
    "learned": {},
    "learned offset": dict(position_offset=2),
    "sinusoidal": dict(positions="sinusoidal"),
    "sinusoidal halves": dict(positions="sinusoidal", sinusoid="halves"),
    **{f"rope {name}": dict(positions="rope", rope=rope) for name, rope in ROPES.items()},
    "rope window": dict(positions="rope", window=4),
    "rope window base": dict(positions="rope", window=4, window_rope_base=9.0),
    "rope window sinks": dict(positions="rope", window=4, window_rope_base=9.0, sink_tokens=2),
    "rope pattern yarn": dict(
        positions="rope", num_layers=2, window=(3, None), window_rope_base=9.0, rope=YARN
    ),
    "rope pattern": dict(
        positions="rope", num_layers=2, window=(3, None), window_rope_base=9.0,
        rope=dict(base=70.0, scaling="linear", factor=3.0, pairing="interleaved", dims=6),
    ),
    "rope, as Llama": dict(
        positions="rope", norm="rmsnorm", activation="silu", glu=True, use_bias=False,
        num_kv_heads=1, tie_embeddings=False,
    ),
    "shaw": dict(positions="shaw"),
    "shaw distance": dict(positions="shaw", relative_max_distance=3),
    "t5": dict(positions="t5"),
    "t5 buckets": dict(positions="t5", relative_buckets=8),
    "t5 distance": dict(positions="t5", relative_buckets=8, relative_max_distance=9),
    "alibi": dict(positions="alibi"),
    "alibi window": dict(positions="alibi", window=4, sink_tokens=1),
    "encoder learned": dict(
        kind="encoder", position_offset=2, type_vocab_size=2, num_classes=3, pooler="relu",
        masked_token_head=True, embedding_norm=True, norm_order="post", logit_bias=True,
    ),
    "encoder rope": dict(kind="encoder", positions="rope", num_classes=3, rope=dict(base=70.0)),
    "encoder t5": dict(
        kind="encoder", positions="t5", relative_buckets=8, relative_max_distance=9
    ),
    "encoder alibi": dict(kind="encoder", positions="alibi"),
    "encoder shaw": dict(kind="encoder", positions="shaw", relative_max_distance=3),
    "encoder-decoder learned": dict(kind="encoder-decoder", position_offset=2),
    "encoder-decoder sinusoidal": dict(
        kind="encoder-decoder", positions="sinusoidal", sinusoid="halves", num_decoder_layers=2
    ),
    "encoder-decoder t5": dict(
        kind="encoder-decoder", positions="t5", relative_buckets=8, relative_max_distance=9,
        logit_scale=0.25,
    ),
}  # fmt: skip
FRESH = ("rope plain", "learned offset", "shaw distance", "t5 buckets")
"""Models whose parameters of key 0 are compared, too."""

RECURRENT: dict[str, dict[str, Any]] = {
    "lstm": dict(num_layers=2),
    "gru, tied": dict(cell="gru", tie_embeddings=True, d_embed=8),
    "sequence to sequence": dict(source_vocab_size=13, attention="dot"),
    "general, from both ends": dict(source_vocab_size=13, attention="general", bidirectional=True),
    "additive": dict(
        source_vocab_size=13, attention="additive", d_attention=5, bidirectional=True, cell="gru"
    ),
}
SMALL_RECURRENT = RecurrentConfig(vocab_size=11, d_embed=6, d_hidden=8, init_std=0.5)

LORA = [
    LoraConfig(),
    LoraConfig(rank=2, alpha=3.0, rslora=True, targets="all-linear"),
    LoraConfig(rank=4, targets=("attention/query", "feed_forward/down"), layers=(0, 2)),
]

REFUSED: dict[str, dict[str, Any]] = {
    "a base without a rotation": {"positions": "learned", "rope": {"base": 500.0}},
    "a scaling without a rotation": {"rope": {"scaling": "linear", "factor": 2.0}},
    "an offset without a table": {"positions": "rope", "position_offset": 2},
    "halves of no sinusoids": {"positions": "none", "sinusoid": "halves"},
    "buckets without a table": {"positions": "alibi", "relative_buckets": 8},
    "a distance without a clip": {"positions": "rope", "relative_max_distance": 9},
    "a base of windows without any": {"positions": "rope", "window_rope_base": 9.0},
    "a base of windows without a rotation": {"window": 4, "window_rope_base": 9.0},
    "a factor without a scaling": {"positions": "rope", "rope": {"factor": 2.0}},
    "a yarn without a length": {"positions": "rope", "rope": {"scaling": "yarn"}},
    "an odd number of buckets": {"positions": "t5", "relative_buckets": 7},
    "positions that do not exist": {"positions": "rotary"},
    "a key that does not exist": {"relative_bucket": 8},
    "a key of the rotation that does not exist": {"positions": "rope", "rope": {"bases": 8.0}},
    "a rotation that is none": {"positions": "rope", "rope": 3},
}


def main() -> None:
    """Write everything anew."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    with tempfile.TemporaryDirectory() as work, contextlib.chdir(work):
        chosen = np.random.default_rng(20_261_123).choice(WORDS, 420)
        Path("text.txt").write_text(" ".join(chosen), encoding="utf-8")
        shutil.copy("text.txt", OUT)
        _publish(Path("published"))
        runs = {name: _run(name, **recipe) for name, recipe in RUNS.items()}
    expected = {
        "written_by": _versions(),
        "runs": runs,
        "lora": _lora(OUT / "pretrained_llama3", runs["pretrained_llama3"]["tokens"]),
        "params": _params(),
    }
    _write(OUT / "expected.json", expected)
    _write(OUT / "old_configs.json", _configs())
    _check(OUT)


# Runs


def _publish(folder: Path) -> None:
    """Save a model with a tokenizer as they are published."""
    files = tokenizer_files(ByteTokenizer(), PUBLISHED.vocab_size)[0]
    definition = json.loads(files["tokenizer.json"])
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    definition["added_tokens"] = [
        dict(id=i, content=text) | flags for i, text in ((256, "<s>"), (257, "</s>"))
    ]
    beside = dict(bos_token="<s>", eos_token="</s>", tokenizer_class="PreTrainedTokenizerFast")
    files |= {
        "tokenizer.json": json.dumps(definition).encode(),
        "tokenizer_config.json": json.dumps(beside).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [257]}).encode(),
    }
    save_pretrained(folder, PUBLISHED, init_params(PUBLISHED, jax.random.key(1)), files=files)


def _run(name: str, flags: str, more: str, prompt: str, stop: int | None = None) -> dict[str, Any]:
    """Train one, keep its folder, and tell what it says and how it goes on."""
    sizes = "" if "--init-from" in flags else SMALL
    argv = f"{sizes} {SHORT} {SPED} {flags} --out {name}".split()
    before = progress.progress_for_output
    progress.progress_for_output = progress.Silent if stop is None else lambda: _Stops(stop)
    try:
        status = train.main(argv)
    finally:
        progress.progress_for_output = before
    assert status == (0 if stop is None else 128 + signal.SIGTERM), status
    (Path(name) / "loss.png").unlink()
    folder = Path(shutil.copytree(name, OUT / name))
    steps = checkpoint.saved_steps(folder / "checkpoints")
    found: dict[str, Any] = {"steps": steps, "prompt": prompt}
    model = load_run(folder, "last")
    found["num_params"] = num_params(model.config)
    found["tokens"] = np.resize(model.tokenizer.encode(prompt), (1, 12)).tolist()
    for which in ("best", "last")[2 - len(steps) :]:
        model = load_run(folder, which)
        text = _written(folder, which, prompt)
        _check_margin(model, prompt, text)
        apply = jax.jit(build(model.config).apply)
        logits = apply({"params": model.params}, np.array(found["tokens"], np.int32))[0]
        found[which] = {"text": text, "logits": logits_of(logits)}
    found["resume"] = _resumed(name, more, steps[-1])
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert size < LIMIT, (name, size)
    print(name, steps, size, "bytes", repr(found["last"]["text"]))
    return found


class _Stops(progress.Silent):
    """Sends the signal that ends a run when a step is shown."""

    def __init__(self, step: int) -> None:
        self._at = step

    def step(self, step: int, loss: float, tokens_per_second: float | None) -> None:
        if step == self._at:
            os.kill(os.getpid(), signal.SIGTERM)


def _written(folder: Path, which: str, prompt: str) -> str:
    """Return what `python -m transformer_jax.generate` prints with greedy decoding."""
    path = Path(checkpoint.__file__).with_name("generate.py")
    spec = importlib.util.spec_from_file_location("command_generate", path)
    assert spec is not None and spec.loader is not None
    command = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(command)
    argv = ["--run", str(folder), "--checkpoint", which, "--prompt", prompt]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert command.main([*argv, "--temperature", "0", "--tokens", "16"]) == 0
    return out.getvalue()


def _check_margin(model: Any, prompt: str, text: str) -> None:
    """No token of a text was likeliest by little."""
    start = len(model.tokenizer.encode(prompt))
    ids = model.tokenizer.encode(text[:-1])
    assert len(ids) <= model.config.max_len, "the model would have read its text anew"
    logits = build(model.config).apply({"params": model.params}, ids[None].astype(np.int32))[0]
    top = np.sort(np.asarray(logits)[0, start - 1 : -1], axis=-1)
    assert (gap := float((top[:, -1] - top[:, -2]).min())) > MARGIN, (text, gap)


def _resumed(name: str, more: str, step: int) -> dict[str, Any]:
    """The flags of a resumed run and what it measures after `step`."""
    argv = ["--resume", "--out", name, *more.split()]
    assert train.main(argv) == 0
    lines = [line for line in RunFolder(Path(name)).read_metrics() if line["step"] > step]
    assert [line["step"] for line in lines] == list(range(step + 1, lines[-1]["step"] + 1))
    kept = ("step", "loss", "val_loss")
    return {
        "flags": more.split(),
        "measured": [{key: line[key] for key in kept if key in line} for line in lines],
    }


def _lora(run: Path, tokens: list[list[int]]) -> dict[str, Any]:
    """Save adapters of a run's model; what they make of it."""
    model = load_run(run, "last")
    config = LoraConfig(rank=2, alpha=3.0, targets=("query", "value", "down"), rslora=True)
    adapters = init_lora(model.params, config, jax.random.key(2))
    adapters = jax.tree.map(
        lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size).reshape(x.shape)), adapters
    )
    names = tensor_names(model.config)
    save_lora(OUT / "lora", model.params, adapters, config, names, base_model="published")
    config, adapters = load_lora(OUT / "lora", model.params, names)
    params = apply_lora(model.params, adapters, config)
    logits = jax.jit(build(model.config).apply)({"params": params}, np.array(tokens, np.int32))[0]
    return {
        "run": run.name,
        "config": dataclasses.asdict(config),
        "tokens": tokens,
        "logits": logits_of(logits),
    }


# Parameters alone


def _params() -> dict[str, str]:
    """Save parameters of models that no run trains, `filled`; their configs' names by folder."""
    found = {}
    for name in ("encoder learned", "encoder-decoder t5", "additive"):
        config = _model(name) if name in MODELS else _recurrent(name)
        params = filled(jax.eval_shape(lambda c=config: init_params(c, jax.random.key(0))))
        tree = {"params": params, "key": jax.random.key(6), "note": 0.5}
        folder = OUT / "params" / name.replace(" ", "_")
        checkpoint.save(folder, 3, tree, {"note": "written alone"})
        found[folder.name] = name
    return found


# Configs


def _model(name: str) -> ModelConfig:
    changes = dict(MODELS[name])
    if "rope" in changes:
        changes["rope"] = RopeConfig(**changes["rope"])
    return dataclasses.replace(TINY, **changes)


def _recurrent(name: str) -> RecurrentConfig:
    return dataclasses.replace(SMALL_RECURRENT, **RECURRENT[name])


def _configs() -> dict[str, Any]:
    defaults = {
        "train": _stored(TrainConfig()),
        "recurrent": _stored(RecurrentConfig()),
        "lora": _stored(LoraConfig()),
    }
    layouts: dict[str, list[str]] = {}
    models, recurrent, seen = {}, {}, []
    for name in MODELS:
        config = _model(name)
        stored = json.loads(config_to_json(TrainConfig(model=config)))["model"]
        entry = {"config": without(stored, defaults["train"]["model"])}
        entry |= _measured(name, config, layouts)
        for other, logits in seen:  # every field that a config has more than another one matters
            if len(logits) == len(entry["logits"]):
                far = np.abs(np.subtract(logits, entry["logits"])).max()
                assert far > MARGIN * np.abs(logits).max(), (name, other)
        seen.append((name, entry["logits"]))
        models[name] = entry
    for name in RECURRENT:
        config = _recurrent(name)
        stored = _stored(config)
        recurrent[name] = {"config": without(stored, defaults["recurrent"])}
        recurrent[name] |= _counted(name, config, layouts)
    presets = {}
    for name in (None, *PRESETS):
        config = train_preset(name)
        changes = without(_stored(config), defaults["train"])
        presets[name or ""] = {"config": changes, "num_params": num_params(config.model)}
    for name, content in REFUSED.items():
        try:
            config_from_json(json.dumps({"model": content}))
        except ConfigError:
            continue
        raise AssertionError(name)
    return {
        "written_by": _versions(),
        "tokens": TOKENS,
        "source": SOURCE,
        "defaults": defaults,
        "presets": presets,
        "models": models,
        "recurrent": recurrent,
        "lora": [{"config": without(_stored(c), defaults["lora"]), "scale": c.scale} for c in LORA],
        "layouts": layouts,
        "refused": REFUSED,
    }


def _stored(config: Any) -> dict[str, Any]:
    """A config as JSON gives it back."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def without(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are not the defaults', in nested configs too."""
    found = {}
    for name, value in config.items():
        if isinstance(value, dict):
            value = without(value, defaults[name])
            if value:
                found[name] = value
        elif value != defaults[name]:
            found[name] = value
    return found


def _measured(name: str, config: ModelConfig, layouts: dict[str, list[str]]) -> dict[str, Any]:
    """Return the counts of `_counted`, and the logits of filled and of fresh parameters."""
    found = _counted(name, config, layouts)
    params = filled(jax.eval_shape(lambda: init_params(config, jax.random.key(0))))
    found["logits"] = rounded(_logits(config, params)[0, -1])
    if config.num_classes is not None:
        tokens = np.array(TOKENS, np.int32)
        classes = build(config).apply({"params": params}, tokens, method="classify")
        found["classes"] = rounded(classes[0])
    if name in FRESH:
        found["fresh"] = rounded(_logits(config, init_params(config, jax.random.key(0)))[0, -1])
    return found


def _counted(name: str, config: Any, layouts: dict[str, list[str]]) -> dict[str, Any]:
    """Parameters' number, and the first config that has those of the same names and shapes."""
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    layout = [
        f"{jax.tree_util.keystr(path, simple=True, separator='/')} {list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]
    ]
    same = next((other for other, known in layouts.items() if known == layout), name)
    layouts[same] = layout
    return {"num_params": num_params(config), "layout": same}


def filled(shapes: Any) -> Any:
    """Parameters by NumPy alone, whose RandomState is the same in every version."""
    random = np.random.RandomState(7)
    return jax.tree.map(lambda x: jnp.asarray(random.uniform(-0.8, 0.8, x.shape), x.dtype), shapes)


def _logits(config: ModelConfig, params: Any) -> jax.Array:  # f32[1, T, V]
    more = {}
    if config.kind == "encoder-decoder":
        more["source"] = np.array(SOURCE, np.int32)
    apply: Callable[..., Any] = jax.jit(build(config).apply)
    return apply({"params": params}, np.array(TOKENS, np.int32), **more)[0]


# Files


def logits_of(logits: jax.Array) -> dict[str, Any]:  # f32[1, T, V]
    """The first columns of logits, and what all columns come to."""
    return {
        "first": [rounded(row) for row in logits[0, :, :COLUMNS]],
        "logsumexp": rounded(jax.nn.logsumexp(logits[0], axis=-1)),
    }


def rounded(row: Any) -> list[float]:
    """Float32 numbers in as few digits as give them back."""
    row = np.asarray(row)
    assert row.dtype == np.float32 and np.isfinite(row).all()
    return [float(str(x)) for x in row]


def _versions() -> dict[str, str]:
    names = ("jax", "jaxlib", "flax", "optax", "numpy", "tokenizers")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"commit": COMMIT, "python": platform.python_version(), **found}


def _write(file: Path, content: Mapping[str, Any]) -> None:
    """JSON, with a line for each entry of an object of the first and of the second level."""
    lines = []
    for name, value in content.items():
        if isinstance(value, dict) and any(isinstance(v, dict | list) for v in value.values()):
            inner = ",\n".join(f"  {_line(k)}: {_line(v)}" for k, v in value.items())
            lines.append(f" {_line(name)}: {{\n{inner}\n }}")
        else:
            lines.append(f" {_line(name)}: {_line(value)}")
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    assert json.loads(file.read_text(encoding="utf-8")) == json.loads(json.dumps(content))


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _check(folder: Path) -> None:
    """No file names a place of this machine."""
    for file in folder.rglob("*"):
        if file.suffix in (".json", ".jsonl", ".txt"):
            text = file.read_text(encoding="utf-8")
            for place in (tempfile.gettempdir(), str(Path.home()), str(OUT.parent)):
                assert place not in text, (file, place)


if __name__ == "__main__":
    main()
