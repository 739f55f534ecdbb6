"""Keywords and flags of other libraries: one-line errors that suggest the right argument."""

from __future__ import annotations

import inspect
import pydoc
import re
from dataclasses import fields, is_dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_jax as tj
from tests.support.drawn import drawn
from transformer_jax import config, decoding, interpret, models
from transformer_jax.attention.masks import Everything
from transformer_jax.cli.flags import spelled
from transformer_jax.config import AnyModelConfig, ConfigError, keywords, optimizers, tasks
from transformer_jax.config.kinds import kinds_of
from transformer_jax.lectures import tasks as lectures

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = tj.ModelConfig(vocab_size=11, d_model=8, num_layers=1, num_heads=2, max_len=17)
TOKENS = np.arange(7)[None]
ENCODER = tj.ModelConfig(kind="encoder", vocab_size=11, d_model=8, num_layers=1, num_heads=2)
X = np.zeros((1, 7, 2, 4), np.float32)


@pytest.fixture(scope="module")
def params():
    return drawn(CONFIG)


CONFIGS = [
    one
    for module in (config, optimizers, tasks, lectures)
    for one in (*vars(module).values(), *kinds_of(AnyModelConfig).values())
    if is_dataclass(one) and isinstance(one, type) and one.__name__[0] != "_"
]


@pytest.mark.parametrize("kind", [tj.ModelConfig, tj.LoraConfig, tj.Rope])
def test_config_help_describes_every_field(kind):
    text = " ".join(pydoc.plain(pydoc.render_doc(kind)).replace("|", " ").split())
    for field in fields(kind):
        assert f" {field.name}: {keywords.field_docs(kind)[field.name]}" in text


def test_every_public_config_documents_its_fields():
    assert len(CONFIGS) > 30
    for kind in CONFIGS:
        named = re.findall(r"^    (\w+): .", kind.__doc__.partition("Fields:")[2], re.M)
        assert named == [field.name for field in fields(kind)], kind


def test_help_for_class_without_source_is_docstring(monkeypatch):
    def no_source(kind):
        raise OSError("could not get source code")

    monkeypatch.setattr(inspect, "getsource", no_source)
    keywords.field_docs.cache_clear()
    assert tj.LoraConfig.__doc__.endswith("(Hu et al. 2021).")
    keywords.field_docs.cache_clear()


def model(**keywords):
    return tj.build(CONFIG).apply({"params": {}}, TOKENS, **keywords)


def encoder(**keywords):
    return tj.build(ENCODER).apply({"params": {}}, TOKENS, method="classify", **keywords)


def attend(**keywords):
    return tj.dot_product_attention(X, X, X, **keywords)


generate = tj.generate  # called without its required arguments
MEANT = {
    # a call of a model
    "attention_mask": (model, r"positions=jnp.where\(valid, jnp.cumsum\(valid, axis=1\) - 1, -1\)"),
    "input_ids": (model, "tokens"),
    "position_ids": (model, "positions"),
    "past_key_values": (model, "cache"),
    "is_training": (model, "key, a random key that turns dropout on"),
    "train": (model, "key, a random key"),
    "training": (encoder, "key, a random key"),
    "token_type_ids": (encoder, "types"),
    "labels": (model, r"cross_entropy\(logits, labels\)"),
    "segment_ids": (model, "segments"),
    "max_new_tokens": (model, r"generate\(step, ..., num_tokens=...\)"),
    # attention: jax.nn, flax, torch, tokamax, flash-attention
    "deterministic": (attend, "dropout_rate=0.0, which turns dropout off"),
    "logits_scale": (attend, "scale$"),
    "block_mask": (attend, "mask$"),
    "dropout_mask": (attend, "dropout_rate and dropout_key"),
    "q_indices": (attend, "q_positions$"),
    "k_indices": (attend, "k_positions$"),
    "query_seq_lengths": (attend, r"mask=Dense\(\(jnp.arange\(T\)\[None\] < query_seq_lengths"),
    "key_value_seq_lengths": (attend, r"mask=Padding\(jnp.arange\(S\)\[None\] < key_value_seq_le"),
    "precision": (attend, r"jax.default_matmul_precision\(...\)"),
    "dropout_rng": (attend, "dropout_key"),
    "dtype": (attend, "query, which sets the dtype"),
    "alibi_slopes": (attend, r"bias=ALiBi\("),
    "attn_mask": (partial(tj.dot_product_attention_weights, X, X), "mask$"),
    "is_causal": (partial(tj.explain_attention, X, X, X), r"mask=Causal\(\)"),
    "q_segment_ids": (attend, r"mask=Segments\(q_segment_ids, kv_segment_ids\)"),
    "s_aux": (attend, "sinks$"),
    "return_softmax": (attend, r"dot_product_attention_weights\("),
    "q": (tj.dot_product_attention, "query$"),
    # decoding
    "max_tokens": (generate, "num_tokens$"),
    "beam_width": (tj.beam_search, "num_beams$"),
    "gamma": (tj.speculate, "num_draft$"),
    "max_num_seqs": (tj.serve_requests, "slots$"),
    "num_return_sequences": (tj.fork, "copies$"),
    "temperature": (tj.Sample, r"Sample\(Temperature\(...\)\)$"),
    "top_k": (tj.TopK, "k$"),
    "ngram_size": (tj.NoRepeatNGram, "n$"),
    "stop_token": (partial(tj.MinLength, 3), "stop$"),
    "key_padding_mask": (tj.Padding, "valid=~key_padding_mask$"),
    "streamer": (generate, r"stream\("),
    "output_attentions": (generate, r"capture=\('block_\*/attention/weights',\)"),
    "attention": (generate, r"capture=\('block_\*/attention/weights',\)"),
    "head_mask": (model, r"model.edited\(interpret.scale\('block_\*/attention/heads', mask\)\)"),
    "bad_words_ids": (generate, r"processors=\[BanSequences\("),
    # the rest
    "torch_dtype": (partial(tj.load_pretrained, "a"), "dtype"),
    "pretrained_model_name_or_path": (tj.load_pretrained, "path_or_id"),
    "device_map": (partial(tj.load_pretrained, "a"), "sharding"),
    "max_length": (partial(tj.init_cache, CONFIG, 1), "capacity"),
    "batch_size": (partial(tj.init_cache, CONFIG, capacity=8), "batch"),
    "seed": (partial(tj.init_params, CONFIG), "key"),
    "ignore_index": (partial(tj.cross_entropy, X, X), "ignore_label"),
    "rope_theta": (tj.Rope, "base"),
    "num_local_experts": (tj.Experts, "count"),
    "normalize_qk": (tj.ModelConfig, "qk_norm"),
    "mlp_bias": (tj.ModelConfig, "ff_bias"),
    "rotary_base": (tj.ModelConfig, r"positions=Rope\(base="),
    "lr": (tj.fit, r"TrainConfig\(learning_rate="),
    "fwd_hooks": (model, r"model.edited\(\{'block_0/residual'"),
    "output_hidden_states": (model, "capture="),
    "n_ctx": (tj.ModelConfig, "max_len"),
    "warmup_iters": (tj.TrainConfig, "warmup_steps"),
}


@pytest.mark.parametrize("name", MEANT)
def test_keyword_from_other_library_suggests_equivalent_argument(name):
    call, hint = MEANT[name]
    with pytest.raises(TypeError, match=rf"has no (argument|field) '{name}'; use {hint}") as error:
        call(**{name: 1})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (attend, "enable_gqa"),
        (generate, "use_cache"),
        (generate, "pad_token_id"),
        (partial(tj.load, "a"), "trust_remote_code"),
    ],
)
def test_unneeded_keyword_error_suggests_omitting_it(call, name):
    with pytest.raises(TypeError, match=rf"has no argument '{name}'; leave it out: "):
        call(**{name: True})


def test_every_public_function_suggests_nearest_valid_keyword():
    without = ("build", "num_params", "places", "rewind_cache", "preset", "train_preset")
    functions = [getattr(tj, name) for name in tj.__all__ if name not in without]
    checked = 0
    for call in filter(inspect.isfunction, functions):
        *named, last = inspect.signature(call).parameters
        last, others = ("block_table", named) if last == "options" else (last, ())
        # this error comes before that of missing arguments
        with pytest.raises(TypeError, match=rf"did you mean {last}\?$"):
            call(**{f"{last}s": 1, **dict.fromkeys(others)})
        checked += 1
    assert checked > 20


@pytest.mark.parametrize("kind", [tj.Sample, tj.Window, tj.Segments, tj.Request, tj.LengthPenalty])
def test_invalid_keyword_error_names_class(kind):
    with pytest.raises(TypeError, match=rf"^{kind.__name__}\(\) has no argument 'nothing'$"):
        kind(nothing=1)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(3, 2), (0, 1), (2, 0), 2])
def test_jax_nn_window_error_suggests_equivalent_window(size):
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 7, 2, 4)) for i in range(3))
    with pytest.raises(TypeError, match=r"local_window_size'; use ") as error:
        tj.dot_product_attention(q, k, v, local_window_size=size)
    mask = eval(str(error.value).partition("mask=")[2], {"Window": tj.Window})
    ours = tj.dot_product_attention(q, k, v, mask=mask, implementation="xla")
    theirs = jax.nn.dot_product_attention(q, k, v, local_window_size=size)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("keywords", "meant"),
    [
        (dict(window_size=(3, -1)), r"Window\(4, None\)"),
        (dict(window_size=5), r"Causal\(\) & Window\(5\)"),
        (dict(local_window_size=(3, 2)), r"Window\(4, 3\)"),
    ],
)
def test_window_that_excludes_query_suggests_equivalent_mask(keywords, meant):
    with pytest.raises(TypeError, match=f"use mask={meant}"):
        attend(**keywords)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keywords",
    [
        dict(query_seq_lengths=np.array([5, 3])),
        dict(key_value_seq_lengths=np.array([4, 6])),
        dict(query_indices=None, is_causal=True),
        dict(logits_scale=0.3),
        dict(float_mask=True),
    ],
    ids=lambda keywords: next(iter(keywords)),
)
def test_suggested_arguments_reproduce_jax_nn_results(keywords):
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 7, 2, 4)) for i in range(3))
    names = vars(tj) | dict(jnp=jnp, B=2, T=7, S=7) | keywords
    if "float_mask" in keywords:
        bias = jax.random.normal(jax.random.key(3), (2, 2, 7, 7))
        with pytest.raises(ValueError, match=r"mask is float32.*use bias=array; "):
            tj.dot_product_attention(q, k, v, mask=bias)
        meant, theirs = dict(bias=bias), dict(bias=bias)
    elif "logits_scale" in keywords:
        meant, theirs = dict(scale=0.3), dict(scale=0.3)
    else:
        name = next(name for name in keywords if name != "query_indices")
        with pytest.raises(TypeError, match="use mask=") as error:
            tj.dot_product_attention(q, k, v, **{name: keywords[name]})
        meant = dict(mask=eval(str(error.value).partition("mask=")[2], names))
        theirs = {name: keywords[name]}
    ours = tj.dot_product_attention(q, k, v, **meant, implementation="xla")
    np.testing.assert_allclose(
        ours, jax.nn.dot_product_attention(q, k, v, **theirs), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("--lr", "--learning-rate"),
        ("--max_steps", "--steps"),
        ("--hidden-size", "--d-model"),
        ("--gradient-checkpointing", "--remat full"),
        ("--max-new-tokens", "--num-tokens"),
        ("--tokens", "--num-tokens"),
        ("--run", "--model"),
        ("--num-return-sequences", "--samples"),
    ],
)
def test_flag_from_other_program_suggests_equivalent_flag(wrong, meant):
    flags = {
        name: name
        for name in ("--learning-rate", "--lora", "--steps", "--d-model", "--remat",
                     "--num-tokens", "--samples", "--model")
    }  # fmt: skip
    with pytest.raises(ConfigError, match=rf"no such flag; use {meant}$"):
        spelled([wrong, "1"], flags)


@pytest.mark.parametrize(
    ("hook", "place"),
    [
        ("blocks.0.hook_resid_post", "block_0/residual"),
        ("blocks.0.hook_resid_pre", "embedding"),
        ("blocks.*.attn.hook_pattern", r"block_\*/attention/weights"),
    ],
)
def test_transformerlens_hook_name_suggests_equivalent_place(hook, place, params):
    model = tj.build(CONFIG)
    with pytest.raises(ValueError, match=f"TransformerLens hook is '{place}'"):
        model.apply({"params": params}, TOKENS, capture=(hook,))
    with pytest.raises(ValueError, match=f"TransformerLens hook is '{place}'"):
        model.edited({hook: lambda x: x})
    if "*" not in hook:
        assert interpret.place_of_hook(CONFIG, hook) == place


def test_parameters_without_collection_raise_clear_error(params):
    for wrong in (params, TOKENS):
        with pytest.raises(ValueError, match=r'variables is .*must be \{"params": params\}'):
            tj.build(CONFIG).apply(wrong, TOKENS)
    for method, found in (
        ("ouput_layer", "did you mean output_layer"),
        ("attend", "attention_weights"),
    ):
        with pytest.raises(ValueError, match=f"method is '{method}': .*{found}"):
            tj.build(CONFIG).apply({"params": params}, TOKENS, method=method)


def test_decoder_mask_that_reveals_future_tokens_is_rejected(params):
    call = partial(tj.build(CONFIG).apply, {"params": params}, TOKENS)
    ids = np.array([[0, 0, 0, 1, 1, 1, 1]])
    for mask in (tj.Segments(ids), tj.Padding(ids == 0) | tj.Segments(ids), tj.Window(3)):
        with pytest.raises(ValueError, match=r"replaces Causal\(\).*mask=Causal\(\) & "):
            call(mask=mask)
    for mask in (tj.Causal() & tj.Segments(ids), Everything() & tj.Segments(ids)):
        logits, _ = jax.eval_shape(lambda mask=mask: call(mask=mask))
        assert logits.shape == (1, 7, 11)


def test_names_suggested_in_errors_exist():
    calls = (tj.generate, tj.beam_search, tj.dot_product_attention, tj.make_step, tj.init_cache,
             tj.speculate, tj.cross_entropy, tj.load_pretrained)  # fmt: skip
    apply = (tj.Decoder.__call__, tj.Encoder.__call__, tj.EncoderDecoder.__call__)
    known = {name for call in (*calls, *apply) for name in inspect.signature(call).parameters}
    known |= set(inspect.signature(tj.Decoder.apply).parameters)
    classes = (tj.Temperature, tj.TopK, tj.TopP, tj.Padding, tj.Segments, tj.Window, tj.ALiBi,
               tj.MinLength, *CONFIGS)  # fmt: skip
    known |= {field.name for one in classes for field in fields(one)} | {"edit"}
    for call in (tj.fork, tj.serve_requests, tj.init_paged_cache, tj.save_pretrained):
        known |= set(inspect.signature(call).parameters)
    for text in keywords._OTHER_NAMES:
        if text.startswith(("leave it out: ", "HF_HOME ", "jax.")) or "jnp." in text:
            continue
        first, *more = re.findall(r"[A-Za-z_]\w+(?=\()|^\w+", text)
        assert first in known or hasattr(tj, first) or hasattr(models, first), text
        for name in more:
            there = any(hasattr(x, name) for x in (tj, tj.Decoder, decoding, interpret, optimizers))
            assert name in known or there, text
