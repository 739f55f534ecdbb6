"""Reprs of values: a few lines with shapes, never arrays."""

import dataclasses
import functools
import importlib
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jax
import numpy as np
import pytest

import transformer_jax as tj
from transformer_jax import training
from transformer_jax.cache import StateCache
from transformer_jax.checkpoints.run_folder import check_unused
from transformer_jax.cli.process import one_line
from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.config.block import CustomBlock
from transformer_jax.config.positions import CustomPositions
from transformer_jax.config.tasks import CustomTask
from transformer_jax.corpus import Part
from transformer_jax.decoding.proposers import Proposer
from transformer_jax.decoding.step import Step
from transformer_jax.loading import TextModel
from transformer_jax.models.quantized import quantize
from transformer_jax.pytree import Params
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.trained import CharTokenizer
from transformer_jax.training import init_state, make_optimizer, progress
from transformer_jax.training.loop import Result
from transformer_jax.training.step import TrainState

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = tj.ModelConfig(vocab_size=23, d_model=8, num_layers=3, num_heads=2, max_len=17)
STEP = tj.make_step(tj.build(CONFIG))


@functools.cache
def params() -> Params:
    return tj.init_params(CONFIG, jax.random.key(0))


def state() -> TrainState:
    return init_state(CONFIG, make_optimizer(tj.TrainConfig(model=CONFIG)), 0)


def result() -> Result:
    return Result(
        config=tj.TrainConfig(model=CONFIG), state=state(), step=7, interrupted=False, val_loss=1.5,
        sample="to be " * 997, val_loss_per_character=1.5, best_step=5, rejected=0,
    )  # fmt: skip


def states() -> StateCache:
    sizes = dict(mixers=("gated_delta",), gated_delta=tj.GatedDelta())
    return tj.init_cache(dataclasses.replace(CONFIG, **sizes), 2, 17, slack=3).layers[0]


def pretrained() -> PretrainedTokenizer:
    vocab = {f"w{i}": i for i in range(9973)}
    definition = {"model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}}
    return PretrainedTokenizer(
        json.dumps(definition), chat_templates=(("default", "{{ a }}" * 997),)
    )


LETTERS = CharTokenizer("".join(map(chr, range(40, 997))))
RECURRENT = tj.RecurrentConfig(vocab_size=23, d_embed=5, d_hidden=7)
PROMPT, MANY = np.ones((2, 3), np.int32), tuple(range(997))
TABLE, QUERY = np.ones((97, 89), np.float32), np.ones((1, 5, 2, 3), np.float32)
IDS = np.ones((2, 997), np.int32)
PART = Part(Path(), "train", 997, 89, 997, 10**8, np.dtype("int32"))


def of_kind(kind: str, **fields: object) -> object:
    return tj.build(dataclasses.replace(CONFIG, kind=kind, **fields))


def all_arrays(kind: type) -> object:
    names = kind._fields if hasattr(kind, "_fields") else [f.name for f in dataclasses.fields(kind)]
    return kind(**dict.fromkeys(names, TABLE))


MADE = {
    "ALiBi": lambda kind: kind(TABLE[0]),
    "BPETokenizer": lambda kind: kind.train("to be or not to be", 263),
    "Ban": lambda kind: kind(*MANY),
    "BanSequences": lambda kind: kind(*[MANY] * 97),
    "Beams": lambda kind: tj.beam_search(
        STEP, params(), PROMPT[:1], tj.init_cache(CONFIG, 1, 17), num_tokens=3, num_beams=2
    ),
    "BlockPlan": lambda kind: kind(TABLE, 8, 8),
    "CharTokenizer": lambda kind: LETTERS,
    "Completion": lambda kind: kind("a", np.arange(997), np.arange(997.0), "limit"),
    "Corpus": lambda kind: kind(Path(), "0" * 64, LETTERS, PART, PART, {str(n): {} for n in MANY}),
    "Decoder": lambda kind: of_kind("decoder"),
    "Dense": lambda kind: kind(TABLE > 0),
    "DictionaryTask": lambda kind: kind(of="run", place="embedding", features=997, active=7),
    "Draft": lambda kind: kind(STEP, params(), tj.init_cache(CONFIG, 2, 17)),
    "Encoder": lambda kind: of_kind("encoder"),
    "EncoderDecoder": lambda kind: of_kind("encoder-decoder"),
    "Explanation": lambda kind: tj.explain_attention(QUERY, QUERY, QUERY),
    "Force": lambda kind: kind(*MANY),
    "ForceLast": lambda kind: kind(7, 3),
    "Experts": lambda kind: kind(count=7),
    "Frames": lambda kind: kind(width=7),
    "FrequencyPenalty": lambda kind: kind(0.5),
    "GNMTPenalty": lambda kind: kind(0.6),
    "Generation": lambda kind: tj.generate(
        STEP, params(), PROMPT, tj.init_cache(CONFIG, 2, 17), num_tokens=5
    ),
    "KVCache": lambda kind: tj.init_cache(CONFIG, 2, 17).layers[0],
    "LanguageModel": lambda kind: kind(TextModel(CONFIG, params(), pretrained()), "runs/first"),
    "LengthPenalty": lambda kind: kind(0.6),
    "MinLength": lambda kind: kind(7, 3),
    "MinP": lambda kind: kind(0.5),
    "ModelCache": lambda kind: tj.init_cache(CONFIG, 2, 17),
    "ModelConfig": lambda kind: tj.preset("llama3-8b"),
    "ModelStep": lambda kind: STEP,
    "NgramLM": lambda kind: tj.build(tj.NgramConfig(vocab_size=7)),
    "NoRepeatNGram": lambda kind: kind(3),
    "Padding": lambda kind: kind(TABLE > 0),
    "PagedCache": lambda kind: tj.init_paged_cache(
        CONFIG, 2, 17, num_pages=11, page_size=17
    ).layers[0],
    "Part": lambda kind: PART,
    "Patches": lambda kind: kind(size=7, height=49, width=49, channels=3),
    "PendingTokens": lambda kind: states().pending,
    "Predicate": lambda kind: kind(lambda q, k: k <= q),
    "Prefix": lambda kind: kind(IDS[0]),
    "PresencePenalty": lambda kind: kind(0.5),
    "PretrainedTokenizer": lambda kind: pretrained(),
    "PromptLookup": lambda kind: kind(3),
    "QuantizedKernel": lambda kind: next(
        leaf
        for leaf in jax.tree.leaves(quantize(params(), "int8"), is_leaf=is_made_by(kind))
        if isinstance(leaf, kind)
    ),
    "ConvolutionLM": lambda kind: kind(tj.ConvolutionConfig(vocab_size=7)),
    "RecentTokensStep": lambda kind: tj.make_step(tj.build(tj.WindowConfig(vocab_size=7))),
    "RecurrentLM": lambda kind: tj.build(RECURRENT),
    "RecurrentSeq2Seq": lambda kind: kind(RECURRENT),
    "RecurrentState": lambda kind: tj.init_decode_state(RECURRENT, None, 3, 17),
    "RecurrentStep": lambda kind: tj.make_step(tj.build(RECURRENT)),
    "RecurrentTagger": lambda kind: kind(RECURRENT),
    "RelativeBias": lambda kind: kind(TABLE, True, 128),
    "RepetitionPenalty": lambda kind: kind(1.5),
    "Request": lambda kind: kind(np.arange(997), 5),
    "Result": lambda kind: result(),
    "RunFolder": lambda kind: kind(Path("runs/first")),
    "Segments": lambda kind: kind(IDS),
    "SentenceEncoder": lambda kind: kind(CONFIG, params(), "mean", True, 17),
    "SpecialTokens": lambda kind: kind(LETTERS, tuple(f"<{n}>" for n in MANY)),
    "StateCache": lambda kind: states(),
    "StreamingEncoder": lambda kind: kind(
        dataclasses.replace(CONFIG, window=5, positions="rope"), 7
    ),
    "Temperature": lambda kind: kind(0.5),
    "TextModel": lambda kind: kind(CONFIG, params(), LETTERS),
    "TopK": lambda kind: kind(5),
    "TopP": lambda kind: kind(0.5),
    "TrainConfig": lambda kind: tj.train_preset("gpt2"),
    "TrainState": lambda kind: state(),
    "Typical": lambda kind: kind(0.5),
    "Vectors": lambda kind: kind(width=7),
    "Window": lambda kind: kind(7),
    "WindowLM": lambda kind: kind(tj.WindowConfig(vocab_size=7)),
    "WordTokenizer": lambda kind: kind(tuple(f"w{i}" for i in range(9973))),
}
"""Instances of the public classes that need arguments; large if possible."""

OF_ARRAYS = {
    "Batch", "Circuits", "Dictionary", "DictionaryScores", "FeatureExamples",
    "HeadScores", "History", "TopTokens", "LogitAttribution", "Probe", "Proposal", "RecentTokens",
    "RowSampling", "Slots", "SourceMemory", "Speculation", "Translators",
}  # fmt: skip


def is_made_by(kind: type) -> Callable[[object], bool]:
    return lambda leaf: isinstance(leaf, kind)


def modules() -> list[ModuleType]:
    names = [m.name for m in pkgutil.walk_packages(tj.__path__, "transformer_jax.")]
    # arguments and results of kernels exist only inside a trace
    own = [n for n in names if not n.startswith("transformer_jax.kernels") and "__main__" not in n]
    return [tj, *map(importlib.import_module, own)]


def is_shown(kind: object) -> bool:
    return (
        isinstance(kind, type)
        and not kind.__name__.startswith("_")
        and not issubclass(kind, BaseException)
        and not getattr(kind, "_is_protocol", False)
    )


def public_classes() -> list[type]:
    packages = [m for m in modules() if hasattr(m, "__path__") and m.__name__.count(".") < 2]
    found = [getattr(m, name) for m in packages for name in getattr(m, "__all__", ())]
    bases = {tj.Mask, AnyModelConfig, CustomBlock, CustomPositions, CustomTask, Proposer, Step}
    return sorted({k for k in found if is_shown(k)} - bases, key=lambda k: k.__name__)


def test_dir_lists_exactly_the_public_names():
    for module in (tj, training):
        listed = {name for name in dir(module) if not name.startswith("_")}
        modules = {name for name in listed if inspect.ismodule(getattr(module, name))}
        assert listed - modules == set(module.__all__)
        assert all(hasattr(module, name) for name in listed)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("make_train_step", "; use `from transformer_jax.training import make_train_step`"),
        ("fine_tuning", "; use `from transformer_jax.config import fine_tuning`"),
        ("Rop", r"; did you mean Rope\?"),
        ("laod", r"; did you mean load\?"),
        ("zzzz", ""),
    ],
)
def test_unknown_name_suggests_module_or_nearest_name(name, hint):
    with pytest.raises(
        AttributeError, match=f"^module 'transformer_jax' has no .* '{name}'{hint}$"
    ):
        getattr(tj, name)


def test_every_public_class_has_tested_repr():
    for kind in public_classes():
        if kind.__name__ not in {*MADE, *OF_ARRAYS}:
            inspect.signature(kind).bind()  # TypeError if an argument is missing


@pytest.mark.slow
def test_reprs_fit_on_screen_and_omit_arrays():
    wrong = {}
    for kind in public_classes():
        name = kind.__name__
        try:
            value = (
                all_arrays(kind) if name in OF_ARRAYS else MADE.get(name, lambda kind: kind())(kind)
            )
            texts = repr(value), str(value)
        except Exception as error:
            wrong[name] = repr(error)
            continue
        if not isinstance(value, kind):
            wrong[name] = f"the table makes a {type(value)}"
        for text in texts:
            if not 0 < len(text) <= 1500 or text.count("\n") > 20:
                wrong[name] = f"{len(text)} characters: {text[:99]}"
            if "rray(" in text or " object at 0x" in text:
                wrong[name] = text
    assert not wrong


def test_classes_with_arrays_define_custom_reprs():
    for module in modules():
        for kind in vars(module).values():
            has_fields = dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")
            if not has_fields or not is_shown(kind) or kind.__module__ != module.__name__:
                continue
            annotations = " ".join(str(v) for v in inspect.get_annotations(kind).values())
            if re.search(r"\b(Array|ndarray|Tokenizer)\b", annotations):
                file = inspect.unwrap(kind.__repr__).__code__.co_filename
                assert "transformer_jax" in file or "flax" in file, f"{kind}: {annotations}"


def test_repr_shows_shapes_and_non_default_fields():
    assert repr(CONFIG) == (
        "ModelConfig(vocab_size=23, d_model=8, num_layers=3, num_heads=2, max_len=17)"
    )
    assert repr(tj.TrainConfig()) == "TrainConfig()"
    kv = "k=float32[2,17,2,4], v=float32[2,17,2,4], positions=int32[2,17], length=int32[2]"
    assert f"3 × KVCache({kv})" in repr(tj.init_cache(CONFIG, 2, 17))
    assert repr(CharTokenizer("abc")) == "CharTokenizer(3 tokens)"


def test_consumed_cache_repr_shows_consumed_state():
    cache = tj.init_cache(CONFIG, 1, 17)
    jax.tree.leaves(cache)[0].delete()
    assert repr(cache) == "ModelCache(consumed)"


def test_notebook_prints_lines_instead_of_progress_bar(monkeypatch):
    assert isinstance(progress.progress_for_notebook(), progress.Silent)
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert isinstance(progress.progress_for_notebook(), progress.Lines)
    assert isinstance(progress.Bar(), progress.Lines)


def test_messages_use_python_names_and_commands_use_flags(tmp_path):
    (tmp_path / "config.json").touch()
    with pytest.raises(tj.ConfigError) as caught:
        check_unused(tmp_path)
    assert "`resume=True` continues it, `out=FOLDER` starts another" in str(caught.value)
    assert "--resume continues it, --out FOLDER starts another" in one_line(caught.value)
    assert one_line(ValueError("`text_errors='replace'` is")) == "--text-errors replace is"


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_repr_shows_tracer_shapes(transform):
    printed = []
    transform(lambda cache: printed.append(repr(cache)) or cache)(tj.init_cache(CONFIG, 2, 17))
    assert "KVCache(k=float32[" in printed[0]
