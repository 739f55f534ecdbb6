"""Likely mistakes of new users, each with a one-line error that names the intended call."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax as tj
from tests.support.drawn import drawn
from transformer_jax import cache, models
from transformer_jax.attention import alibi_slopes, relative_bucket
from transformer_jax.config import optimizers
from transformer_jax.models import chunk_mask
from transformer_jax.training import fit
from transformer_jax.training.tasks import compare_texts

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = tj.ModelConfig(vocab_size=23, d_model=16, num_layers=1, num_heads=2, max_len=17)
MODEL = tj.build(CONFIG)
STEP = tj.make_step(MODEL)
PROMPT = np.array([[1, 2, 3]], np.int32)
WINDOWED = replace(CONFIG, window=3, positions=tj.Rope())


def params():
    return drawn(CONFIG)


def params_of_two_layers():
    decoder = params()["decoder"]
    return params() | {"decoder": decoder | {"block_1": decoder["block_0"]}}


def keys_of_nnx():
    from flax import nnx

    return nnx.Rngs(0)


def attend(**more):
    return tj.dot_product_attention(*[jnp.ones((1, 5, 2, 3))] * 3, **more)


def generate(step=STEP, parameters=None, prompt=PROMPT, state=None, **more):
    parameters = params() if parameters is None else parameters
    state = tj.init_cache(CONFIG, 1, 17) if state is None else state
    return tj.generate(step, parameters, prompt, state, **(dict(num_tokens=3) | more))


def reading(step=STEP, prompt=PROMPT, lengths=(3,), chunk=None):
    state = tj.init_cache(CONFIG, 1, 17)
    return tj.prefill(step, params(), prompt, state, np.array(lengths), chunk)


def run(**more):
    return MODEL.apply({"params": params()}, PROMPT, **more)


def tell(**more):
    encoder = tj.build(replace(CONFIG, kind="encoder", type_vocab_size=2))
    return encoder.init(jax.random.key(0), PROMPT, **more)


def chunked(hidden=None, **more):
    hidden = np.ones((1, 3, 2), np.float32) if hidden is None else hidden
    table, labels = np.ones((5, 2), np.float32), np.zeros((1, 3), np.int32)
    return tj.chunked_cross_entropy(hidden, table, labels, **(dict(chunk_size=2) | more))


def searching(step=STEP, **more):
    state = tj.init_cache(CONFIG, 1, 17)
    return tj.beam_search(step, params(), PROMPT, state, num_tokens=3, num_beams=2, **more)


def serving(step=STEP, **more):
    return tj.serve_requests(
        step, params(), [], tj.init_cache(CONFIG, 1, 17), slots=2, capacity=17, **more
    )


def speculating(step=STEP):
    state, proposer = tj.init_cache(CONFIG, 1, 17), tj.PromptLookup(2)
    return tj.speculate(step, params(), PROMPT, state, proposer=proposer, num_tokens=3, num_draft=2)


LOGITS = np.zeros((1, 23), np.float32)
MISTAKES = {
    "generate with a model": (
        partial(generate, MODEL), r"must be a step, such as make_step\(model\)",
    ),
    "generate from a string only": (
        lambda: tj.generate("hello"), r"step is 'hello': .*load\(FOLDER\)\.generate",
    ),
    "serve a folder": (
        lambda: tj.serve_requests("runs/book"), "step is 'runs/book': .*or the serve command",
    ),
    "generate with a config": (partial(generate, CONFIG), r"make_step\(build\(config\)\)"),
    "generate with swapped arguments": (
        lambda: generate(params(), STEP), "step is of type dict: must be callable",
    ),
    "generate with a variables dict": (
        lambda: generate(STEP, {"params": params()}), r"variables\['params'\]",
    ),
    "generate with a model as params": (partial(generate, STEP, MODEL), "such as init_params"),
    "generate with a number as key": (
        partial(generate, sampler=tj.Sample(), key=0), "key is 0: must",
    ),
    "generate with a sampler class": (
        partial(generate, sampler=tj.Sample), "sampler is the class Sample",
    ),
    "generate with a number as sampler": (partial(generate, sampler=0.7), "sampler is 0.7: must"),
    "generate from a string prompt": (
        partial(generate, prompt="to be"), "prompt is a string: .*load.FOLDER",
    ),
    "generate from a config": (partial(generate, state=CONFIG), "state is of type Model"),
    "generate from parameters": (lambda: generate(state=params()), r"is of type dict:"),
    "generate with model.apply": (partial(generate, MODEL.apply),
                          r"the model's apply: .*make_step\(model\)"),
    "generate with nnx.Rngs": (lambda: generate(sampler=tj.Sample(), key=keys_of_nnx()),
                                "key is of type Rngs: must be a single"),
    "generate with parameters of more layers": (
        lambda: generate(STEP, params_of_two_layers()),
        "parameters contain decoder/block_1, but num_layers is 1",
    ),
    "init_cache with a prompt as batch": (partial(tj.init_cache, CONFIG, PROMPT, 17),
                            r"batch is int32\[1, 3\]: must be an integer"),
    "save with swapped arguments": (lambda: tj.save_pretrained(params(), CONFIG, "folder"),
                                    r"params is 'folder': must be a tree of param"),
    "generate from a class": (partial(generate, state=tj.ModelCache), "state is .*: must be a st"),
    "fit with a model config": (
        partial(fit, CONFIG), r"is of type ModelConfig: .*TrainConfig\(model=...\)",
    ),
    "fit with a preset name": (partial(fit, "gpt2"), r"is 'gpt2': .*train_preset\(NAME\)"),
    "load a config": (partial(tj.load_pretrained, CONFIG), "is of type ModelConfig: must be a"),
    "wrong optimizer name": (partial(tj.TrainConfig, optimizer="adam"), r"did you mean adamw\?$"),
    "wrong task name": (partial(tj.TrainConfig, task="sft"), r"did you mean chat\?$"),
    "class instead of positions": (
        partial(tj.ModelConfig, positions=tj.Rope), r"pass an instance: Rope\(...\)",
    ),
    "preset in capitals": (partial(tj.preset, "GPT2"), "did you mean gpt2"),
    "class instead of mask": (partial(attend, mask=tj.Causal), "mask is the class Causal"),
    "stop at a string": (partial(generate, stop="END"),
                       "'END': must be token IDs; load.FOLDER..generate"),
    "stop at strings": (partial(generate, stop=["END"]), "'END': token IDs must be integers"),
    "search with a model": (partial(searching, MODEL), r"make_step\(model\)"),
    "search with a stop string": (partial(searching, stop="END"), "load.FOLDER"),
    "prefill with a model": (partial(reading, MODEL), r"make_step\(model\)"),
    "prefill with chunk 0": (
        partial(reading, chunk=0), "chunk is 0: must be an integer of at least 1",
    ),
    "prefill with chunk -1": (
        partial(reading, chunk=-1), "chunk is -1: must be an integer of at le",
    ),
    "prefill with chunk 2.0": (
        partial(reading, chunk=2.0), "chunk is 2.0: must be an integer of at ",
    ),
    "prefill without tokens": (
        partial(reading, prompt=PROMPT[:, :0]), r"prompt has shape \(1, 0\)",
    ),
    "prefill with too many lengths": (partial(reading, lengths=(3, 3)),
                                     r"shape \(2,\): must be \(1,\)"),
    "prefill with a scalar length": (
        partial(reading, lengths=3), r"lengths have shape \(\): must be \(1,\)",
    ),
    "prefill with too large length": (
        partial(reading, lengths=(4,)), r"\[4\]: must be from 1 to 3",
    ),
    "prefill with too many rows": (
        partial(reading, prompt=[[1], [2]], lengths=(1, 1)), "the cache has 1",
    ),
    "rewind a config": (partial(tj.rewind_cache, CONFIG, 1),
                        "is of type ModelConfig: must be a ModelCache"),
    "rewind to a scalar": (lambda: tj.rewind_cache(tj.init_cache(CONFIG, 1, 17), 3),
                           r"int32\[\]: must be integers \[1\]"),
    "init_cache with an unknown dtype": (partial(tj.init_cache, CONFIG, 1, 17, "float7"),
                            "dtype is 'float7': must be int8 or a floating-point"),
    "init_cache with a string as slack": (partial(tj.init_cache, CONFIG, 1, 17, slack="3"),
                                 "slack is '3': must"),
    "cache_bytes of a recurrent model": (partial(tj.cache_bytes, tj.RecurrentConfig(), 1, 17),
                                   "config is of type RecurrentConfig: it has no cache"),
    "cache_bytes with source length 0": (
        partial(tj.cache_bytes, replace(CONFIG, kind="encoder-decoder"), 1, 17, source_length=0),
        "source_length is 0: must be an integer of at least 1",
    ),
    "decode state of a decoder with a source": (
        lambda: tj.init_decode_state(CONFIG, params(), 1, 17, source=[[1, 2]]),
        r"source has shape \(1, 2\): this model does not accept a source",
    ),
    "decode state of an n-gram model with dtype": (
        partial(tj.init_decode_state, tj.NgramConfig(), None, 1, 17, dtype="int2"),
        "dtype is int2: NgramConfig has no cache",
    ),
    "quantize to 3 bits": (lambda: tj.quantize(params(), "int3"),
                          "kind is 'int3': must be one of 'bf16', 'int8', 'int4'"),
    "quantize a config": (partial(tj.quantize, CONFIG, "int8"), "params is of type ModelConfig:"),
    "places of a string": (partial(tj.places, "gpt2"),
                         r"config is of type str: must be a config, or build"),
    "string as scale": (partial(attend, scale="1/2"), "scale is '1/2': must be a concrete number"),
    "string as softcap": (partial(attend, softcap="a"), "softcap is 'a': must be a concrete"),
    "string as dropout rate": (
        partial(attend, dropout_rate="a"), "rate is 'a': must be a concrete number",
    ),
    "fractional tile size": (
        partial(tj.Causal().block_plan, PROMPT, PROMPT, block_q=1.5, block_k=2,
    ),
                            "block_q is 1.5: must be an integer of at least 1"),
    "loss of lists": (partial(tj.cross_entropy, [[1.0, 2.0]], [0]),
                        "logits is of type list: must be an ar"),
    "loss with a list of labels": (partial(tj.cross_entropy, LOGITS, [0]),
                                   "labels is of type list: must"),
    "loss with a list of weights": (partial(tj.cross_entropy, LOGITS, np.array([0]), weights=[1.0]),
                                    "weights is of type list: must be an array"),
    "string as label smoothing": (
        partial(tj.cross_entropy, LOGITS, np.array([0]), label_smoothing="a",
    ),
                             "label_smoothing is 'a': must be a concrete number"),
    "string as z-loss": (partial(tj.cross_entropy, LOGITS, np.array([0]), z_loss="a"),
                          "z_loss is 'a': must be a concrete number"),
    "fractional chunk of a loss": (partial(chunked, chunk_size=1.5),
                              "chunk_size is 1.5: must be an int"),
    "string as softcap of a loss": (
        partial(chunked, softcap="a"), "softcap is 'a': must be a concrete",
    ),
    "list as logit bias": (partial(chunked, logit_bias=[1.0]),
                                   "logit_bias is of type list: must"),
    "chunked loss of lists": (partial(chunked, [[[1.0]]]),
                                  "hidden is of type list: must be an array"),
    "save to a number": (lambda: tj.save_pretrained(3, CONFIG, params()), "path is of type int:"),
    "save a recurrent model": (lambda: tj.save_pretrained("folder", tj.RecurrentConfig(), params()),
                               "config is of type RecurrentConfig: must be the ModelConfig"),
    "save with shard size 0": (
        lambda: tj.save_pretrained("folder", CONFIG, params(), shard_bytes=0),
        "shard_bytes is 0: must be an integer",
    ),
    "save a string as file": (
        lambda: tj.save_pretrained("folder", CONFIG, params(), files={"a": "text"},
    ),
                    r"files\['a'\] is of type str: must be bytes"),
    "save with a list of keys": (lambda: tj.save_pretrained("folder", CONFIG, params(), keys=["a"]),
                            "keys is of type list: must be a dict keyed by name"),
    "save adapters to a number": (lambda: tj.save_lora(3, params(), {}, tj.LoraConfig(), {}),
                                  "path is of type int: must be the path"),
    "save adapters of a number": (partial(tj.save_lora, "folder", 3, {}, tj.LoraConfig(), {}),
                                  "params is of type int: must be parameters"),
    "load adapters from a number": (
        lambda: tj.load_lora(3, params(), {}), "path is of type int: must be",
    ),
    "load a tokenizer from a number": (partial(tj.load_tokenizer_folder, 3),
                                     "path is of type int: must be"),
    "list of positions": (partial(run, positions=[[0, 1, 2]]), "positions is of type list: must"),
    "list of segments": (partial(run, segments=[[0, 0, 1]]), "segments is of type list: must"),
    "parameters as a cache": (lambda: run(cache=params()), "cache is of type dict: must be a"),
    "list of types": (partial(tell, types=[[0, 0, 1]]), "types is of type list: must be an array"),
    "types of another shape": (partial(tell, types=PROMPT[:, :2]), r"int32\[1, 2\]: must be int"),
    "fractional types": (partial(tell, types=PROMPT * 0.5), r"types are float64\[1, 3\]: must"),
    "streaming encoder of a number": (
        partial(tj.StreamingEncoder, 3, 5), "config is of type int: must be a Model",
    ),
    "fractional frame size": (
        partial(tj.StreamingEncoder, WINDOWED, 5.5), "frame_dim is 5.5: must",
    ),
    "fractional chunk of a streaming encoder": (
        partial(tj.StreamingEncoder, WINDOWED, 5, 1.5), "chunk is 1.5: must",
    ),
    "streaming encoder with parameters as cache": (
        partial(tj.StreamingEncoder(WINDOWED, 5).apply, {}, jnp.ones((1, 2, 5)), cache={}),
        "cache is of type dict: must be a ModelCache",
    ),
    "string as chunk of a mask": (partial(chunk_mask, "a", 1), "chunk is 'a': must be an integer"),
    "fractional number of slopes": (
        partial(alibi_slopes, 2.5), "num_heads is 2.5: must be an integer",
    ),
    "fractional number of buckets": (
        partial(relative_bucket, PROMPT, bidirectional=True, num_buckets=4.5, max_distance=8),
        "num_buckets is 4.5: must be an integer",
    ),
    "compare different numbers of texts": (partial(compare_texts, ["a"], ["a", "b"]),
                           "contains 1 texts: must have 2"),
    "serve one request": (
        lambda: tj.serve_requests(STEP, params(), tj.Request([1], 2), None, slots=1, capacity=17),
        "requests is of type Request: must be an iterable of Request",
    ),
    "cache with value width 0": (partial(cache.init, 1, 4, 1, 2, 0),
                           "value_head_dim is 0: must be an int"),
    "string as sinks": (partial(cache.init, 1, 4, 1, 2, sinks="a"),
                       "sinks is 'a': must be an integ"),
    "fractional sinusoid size": (partial(models.sinusoidal, PROMPT, 4.5),
                                "dim is 4.5: must be an int"),
    "sinusoids with a negative base": (
        partial(models.sinusoidal, PROMPT, 4, -1.0), "base is -1.0: must be",
    ),
    "sinusoids with an unknown layout": (partial(models.sinusoidal, PROMPT, 4, layout="pairs"),
                               "layout is 'pairs': must be 'interleaved' or 'halves'"),
    "rotate a list": (partial(models.apply_rope, [[1.0]], PROMPT, tj.Rope()), "x is of type"),
    "rotate by positions of another shape": (
        partial(models.apply_rope, np.ones((1, 2, 1, 4), np.float32), PROMPT, tj.Rope()),
        r"positions have shape \(1, 3\): must be \(2,\) or \(1, 2\)",
    ),
    "layer_norm with a scale of another width": (
        partial(models.layer_norm, LOGITS, np.ones(3, np.float32),
    ),
                                r"scale has shape \(3,\): must be \(23,\)"),
    "rms_norm with a scale of another width": (
        partial(models.rms_norm, LOGITS, np.ones(3, np.float32)),
        r"scale has shape \(3,\): must be \(23,\)",
    ),
    "layer_norm of a list": (partial(models.layer_norm, [1.0]), "x is of type list: must be an"),
    "apply_lora to a number": (partial(models.apply_lora, 3, {}, tj.LoraConfig()),
                             "params is of type int: must be a dict keyed by module"),
    "merge a number as adapters": (lambda: models.merge_lora(params(), 3, tj.LoraConfig()),
                             "adapters is of type int: must be a dict keyed by module"),
    "serve with a model": (partial(serving, MODEL), r"make_step\(model\)"),
    "serve with a stop string": (partial(serving, stop="END"), "load.FOLDER"),
    "speculate with a model": (partial(speculating, MODEL), r"make_step\(model\)"),
    "make_step of a config": (partial(tj.make_step, CONFIG), r"make_step\(build\(config\)\)"),
    "make_step of parameters": (lambda: tj.make_step(params()), r"make_step\(build\(config\)\)"),
    "make_step of an encoder": (lambda: tj.make_step(tj.build(replace(CONFIG, kind="encoder"))),
                             "model is of type Encoder: must be a decoder"),
    "init_cache of a recurrent model": (partial(tj.init_cache, tj.RecurrentConfig(), 2, 7),
                                   "config is of type RecurrentConfig: .*init_decode_state"),
    "make_step of a name": (partial(tj.make_step, "gpt2"), r"make_step\(build\(config\)\)"),
    "build a string": (partial(tj.build, "gpt2"), r"preset\('gpt2'\) for a size, load_pretrained"),
    "build a class": (partial(tj.build, tj.ModelConfig), r"ModelConfig\(...\)"),
    "init_params of a string": (partial(tj.init_params, "gpt2", jax.random.key(0)), "preset"),
    "init_params of a model": (partial(tj.init_params, MODEL, jax.random.key(0)), "model.config"),
    "init_params with a number as key": (partial(tj.init_params, CONFIG, 0), "key is 0: must"),
    "num_params of parameters": (lambda: tj.num_params(params()), r"sum\(x.size for x in"),
    "num_params of a model": (partial(tj.num_params, MODEL), "model.config"),
    "init_cache of a model": (partial(tj.init_cache, MODEL, 1, 17), "model.config"),
    "init_cache of a step": (partial(tj.init_cache, STEP, 1, 17), "step.model.config"),
    "swapped arguments of Sample": (
        lambda: tj.Sample()(LOGITS, jax.random.key(0)), "logits is key<",
    ),
    "swapped arguments of Greedy": (
        lambda: tj.Greedy()(LOGITS, jax.random.key(0)), "logits is key<",
    ),
    "number as processor": (partial(tj.Sample, 0.7), r"such as Temperature\(0.7\)"),
    "sampler as processor": (partial(tj.Sample, tj.Greedy()), r"such as Temperature\(0.7\)"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_common_mistakes_raise_helpful_errors(mistake):
    call, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert len(str(error.value).splitlines()) == 1


OTHERS = {
    "temperature": (partial(generate, temperature=0.7), r"sampler=Sample\(Temperature\(...\)\)"),
    "top_p": (partial(generate, top_p=0.9), r"use sampler=Sample\(TopP\("),
    "do_sample": (partial(generate, do_sample=True), r"use sampler=Sample\(\)"),
    "num_beams": (partial(generate, num_beams=4), r"use beam_search\("),
    "attention_mask": (partial(generate, attention_mask=PROMPT > 0), "use lengths"),
    "eos_token_id": (partial(searching, eos_token_id=3), "use stop"),
    "max_new_tokens": (partial(generate, max_new_tokens=3), "use num_tokens"),
    "attn_mask": (partial(attend, attn_mask=None), "use mask"),
    "is_causal": (partial(attend, is_causal=True), r"use mask=Causal\(\)"),
    "dropout_p": (partial(attend, dropout_p=0.1), "use dropout_rate"),
    "top_k of requests": (partial(serving, top_k=3),
                          r"serve_requests\(\) has no .*use sampler=Sample\("),
    "masc": (partial(attend, masc=None), "did you mean mask"),
    "hidden_size": (partial(tj.ModelConfig, hidden_size=16), r"no field 'hidden_size'; use d_m"),
    "n_layer": (partial(replace, CONFIG, n_layer=2), "use num_layers"),
    "num_layer": (partial(tj.ModelConfig, num_layer=2), "did you mean num_layers"),
    "hidden_size of cells": (partial(tj.RecurrentConfig, hidden_size=5), "use d_hidden"),
    "lr": (partial(tj.TrainConfig, lr=1e-3), "use learning_rate"),
    "weight_decay": (partial(tj.TrainConfig, weight_decay=0.1), r"use optimizer=AdamW\(weigh"),
    "lr of an optimizer": (partial(optimizers.AdamW, lr=1e-3), "AdamW has no field 'lr'"),
    "r": (partial(tj.LoraConfig, r=8), "use rank"),
    "epochs": (partial(fit, tj.TrainConfig(), epochs=3), r"fit\(\) has no argument 'epochs'"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_keywords_from_other_libraries_suggest_equivalent(name):
    call, message = OTHERS[name]
    with pytest.raises(TypeError, match=message) as error:
        call()
    assert f"{name.split()[0]!r}" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.slow
def test_stop_none_equals_empty_stop():
    found = [generate(stop=stop).tokens.tolist() for stop in (None, (), [])]
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_constant_logits_are_checked_inside_jit():
    constant = jnp.array([1.0, 2.0, -1.0])
    for sampler in (tj.Sample(), tj.Greedy(), tj.Sample(tj.Temperature(0.5), tj.TopP(0.9))):
        drawn = jax.jit(lambda key, s=sampler: s(key, constant))(jax.random.key(3))
        assert int(drawn) == int(sampler(jax.random.key(3), constant))
    wrong = jnp.array([jnp.nan, 1.0])
    with pytest.raises(ValueError, match="the largest logit of row"):
        jax.jit(lambda key: tj.Sample()(key, wrong))(jax.random.key(0))
    with pytest.raises(TypeError, match="positional"):
        STEP(params(), PROMPT, tj.init_cache(CONFIG, 1, 17), np.ones((1, 3), bool))
