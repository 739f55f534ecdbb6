"""What is printed of a value: a few lines, shapes and never arrays."""

import dataclasses
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax as tj
from transformer_jax.checkpoints.run_folder import check_unused
from transformer_jax.cli.process import one_line
from transformer_jax.models.quantized import quantize
from transformer_jax.text.text_model import TextModel
from transformer_jax.tokenizers.trained import CharTokenizer, WordTokenizer
from transformer_jax.training import init_state, make_optimizer, progress
from transformer_jax.training.batch import Batch
from transformer_jax.training.loop import Result

CONFIG = tj.ModelConfig(vocab_size=23, d_model=8, num_layers=3, num_heads=2, max_len=17)
PARAMS = tj.init_params(CONFIG, jax.random.key(0))
STEP = tj.make_step(tj.build(CONFIG))


def is_quantized(leaf) -> bool:
    return hasattr(leaf, "scale")


def result() -> Result:
    config = tj.TrainConfig(model=CONFIG)
    state = init_state(CONFIG, make_optimizer(config), 0)
    return Result(
        config=config, state=state, step=7, interrupted=False, val_loss=1.5, sample="to be " * 997,
        val_loss_per_character=1.5, best_step=5, rejected=0,
    )  # fmt: skip


def values() -> list[object]:
    cache = tj.init_cache(CONFIG, 2, 17)
    prompt = jnp.ones((2, 3), jnp.int32)
    written = tj.generate(STEP, PARAMS, prompt, cache, num_tokens=5)
    recurrent = tj.RecurrentConfig(vocab_size=23, d_embed=5, d_hidden=7)
    query = jnp.ones((1, 5, 2, 3))
    return [
        CONFIG, tj.preset("llama3-8b"), tj.TrainConfig(model=CONFIG), tj.train_preset("gpt2"),
        written, written.state, result(),
        tj.init_paged_cache(CONFIG, 2, 17, num_pages=11, page_size=17),
        tj.init_decode_state(recurrent, None, 3, 17), recurrent, tj.build(CONFIG),
        next(leaf for leaf in jax.tree.leaves(quantize(PARAMS, "int8"), is_leaf=is_quantized)
             if is_quantized(leaf)),
        TextModel(CONFIG, PARAMS, CharTokenizer("".join(map(chr, range(40, 997))))),
        WordTokenizer(tuple(f"w{i}" for i in range(9973))),
        tj.explain_attention(query, query, query), tj.Request(np.arange(997), 5),
        Batch(**{f.name: jnp.ones((97, 89)) for f in dataclasses.fields(Batch)}),
        tj.beam_search(STEP, PARAMS, prompt[:1], tj.init_cache(CONFIG, 1, 17), num_tokens=3,
                       num_beams=2),
    ]  # fmt: skip


def test_nothing_prints_more_than_a_screen_or_an_array():
    for value in values():
        text = repr(value)
        assert 0 < len(text) <= 1500 and text.count("\n") <= 20, f"{type(value)}: {text[:99]}"
        assert "Array(" not in text and "array(" not in text, text


def test_what_is_printed_is_shapes_and_what_differs():
    assert repr(CONFIG) == (
        "ModelConfig(vocab_size=23, d_model=8, num_layers=3, num_heads=2, max_len=17)"
    )
    assert repr(tj.TrainConfig()) == "TrainConfig()"
    kv = "k=float32[2,17,2,4], v=float32[2,17,2,4], positions=int32[2,17], length=int32[2]"
    assert f"3 × KVCache({kv})" in repr(tj.init_cache(CONFIG, 2, 17))
    assert repr(CharTokenizer("abc")) == "CharTokenizer(3 tokens)"


def test_a_consumed_cache_says_so():
    cache = tj.init_cache(CONFIG, 1, 17)
    jax.tree.leaves(cache)[0].delete()
    assert repr(cache) == "ModelCache(consumed)"


def test_a_notebook_shows_lines_and_no_bar(monkeypatch):
    assert isinstance(progress.progress_for_notebook(), progress.Silent)
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert isinstance(progress.progress_for_notebook(), progress.Lines)
    assert isinstance(progress.Bar(), progress.Lines)


def test_messages_speak_python_and_those_of_commands_flags(tmp_path):
    (tmp_path / "config.json").touch()
    with pytest.raises(tj.ConfigError) as caught:
        check_unused(tmp_path)
    assert "`resume=True` continues it, `out=FOLDER` starts another" in str(caught.value)
    assert "--resume continues it, --out FOLDER starts another" in one_line(caught.value)
    assert one_line(ValueError("`text_errors='replace'` is")) == "--text-errors replace is"


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_tracers_print_their_shapes(transform):
    printed = []
    transform(lambda cache: printed.append(repr(cache)) or cache)(tj.init_cache(CONFIG, 2, 17))
    assert "KVCache(k=float32[" in printed[0]
