"""Tests of `init_decode_state` for every generative model."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.tolerances import FORWARD_F32, assert_near
from transformer_jax.config import (
    ConvolutionConfig,
    ModelConfig,
    NgramConfig,
    RecurrentConfig,
    WindowConfig,
)
from transformer_jax.decoding.batch_rows import count_rows
from transformer_jax.decoding.beams import beam_search
from transformer_jax.decoding.generation import generate
from transformer_jax.decoding.step import make_step
from transformer_jax.lectures.ngram import count_ngrams
from transformer_jax.models.factory import build, init_decode_state, init_params, num_params

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROWS, VOCAB, CAPACITY = 2, 13, 17
SIZES = dict(vocab_size=VOCAB, d_embed=5, d_hidden=7, init_std=0.7)
LAYERS = dict(vocab_size=VOCAB, d_model=6, num_heads=3, num_layers=1, d_ff=5, max_len=19)
ALONE = dict(d_ff=0, num_layers=2)
TEXT = np.random.default_rng(3).integers(0, VOCAB, (5, 23), dtype=np.int32)
CONFIGS = {
    "decoder": ModelConfig(**LAYERS),
    "encoder-decoder": ModelConfig(**LAYERS, kind="encoder-decoder", init_std=0.7),
    "attention alone": ModelConfig(**LAYERS | ALONE, init_std=0.7),
    "attention alone, scanned": ModelConfig(**LAYERS | ALONE, init_std=0.7, scan_layers=True),
    "rnn": RecurrentConfig(**SIZES, cell="rnn"),
    "translator": RecurrentConfig(
        **SIZES, source_vocab_size=11, cell="gru", attention="general", context="state"
    ),
    "convolution": ConvolutionConfig(vocab_size=VOCAB, d_hidden=7, num_layers=2, init_std=0.7),
    "window": WindowConfig(**SIZES, context=3),
    "ngram": NgramConfig(vocab_size=VOCAB, order=3),
}
WITH_SOURCE = ("encoder-decoder", "translator")
SOURCE = np.array([[3, 5, 0, 7, 0], [1, 2, 9, 4, 8]], np.int32)
SOURCE_VALID = np.array([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]], bool)
PROMPT = np.array([[1, 2, 3], [4, 0, 0]], np.int32)
LENGTHS = np.array([3, 1])


@cache
def config_and_params(name: str):
    """Return a config and its parameters (for n-grams, counted from text)."""
    config = CONFIGS[name]
    if isinstance(config, NgramConfig):
        return count_ngrams(config, TEXT)
    return config, init_params(config, jax.random.key(1))


def initial_state(name: str, **changes):
    """Create the initial state in a compiled call, as a server would."""
    config, params = config_and_params(name)
    given = dict(source=SOURCE, source_valid=SOURCE_VALID) if name in WITH_SOURCE else {}
    call = jax.jit(init_decode_state, static_argnums=(0, 2, 3))
    return call(config, params, ROWS, CAPACITY, **given | changes)


@partial(jax.jit, static_argnums=0)
def apply(config, params, tokens, **arguments):
    """Apply the model to whole sequences, without a state."""
    return build(config).apply({"params": params}, tokens, **arguments)[0]


def full_pass(name: str, row: int, tokens: np.ndarray) -> np.ndarray:  # f32[T, V]
    """Return the logits of one row without a state and without padding in its source."""
    source = SOURCE[row : row + 1, SOURCE_VALID[row]]
    more = dict(source=source) if name in WITH_SOURCE else {}
    padded = np.pad(tokens, (0, CAPACITY - len(tokens)))[None]
    return np.asarray(apply(*config_and_params(name), padded, **more)[0, : len(tokens)])


@pytest.mark.slow
@pytest.mark.long_except("rnn", "attention alone*")
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_from_initial_state_match_full_forward_argmax(name):
    """The source has padding in several places, which must have no effect."""
    config, params = config_and_params(name)
    step, state = make_step(build(config)), initial_state(name)
    assert count_rows(state) == ROWS
    out = generate(step, params, PROMPT, state, num_tokens=5, lengths=LENGTHS)
    for row, length in enumerate(LENGTHS):
        text = np.asarray(out.tokens)[row]
        logits = full_pass(name, row, np.concatenate([PROMPT[row, :length], text[:-1]]))
        np.testing.assert_array_equal(text, logits[length - 1 :].argmax(axis=-1))
        log_p = logits[length - 1 :].astype(np.float64)
        log_p = log_p - np.log(np.exp(log_p).sum(axis=-1, keepdims=True))
        assert_near(out.log_probs[row], log_p.max(axis=-1), 10 * FORWARD_F32)


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, True])
def test_attention_only_block_has_no_feed_forward_parameters(scanned):
    """Use a width of 256, so that sample deviations are close to the formula."""
    D, L = 256, 3
    config = ModelConfig(
        vocab_size=7, d_model=D, num_layers=L, d_ff=0, use_bias=False, max_len=5,
        positions="rope", scan_layers=scanned,
    )  # fmt: skip
    decoder = init_params(config, jax.random.key(3))["decoder"]
    blocks = [decoder["blocks"]] if scanned else [decoder[f"block_{i}"] for i in range(L)]
    for block in blocks:
        assert block.keys() == {"attention", "norm_attention"}
        for name, std in dict(query=0.02, key=0.02, value=0.02, out=0.02 / L**0.5).items():
            found = float(np.std(block["attention"][name]["kernel"]))
            assert abs(found / std - 1) < 0.02, (name, found)
    assert num_params(config) == 7 * D + L * (4 * D * D + D) + D


@pytest.mark.slow
def test_beam_search_with_one_beam_matches_greedy():
    """Use a translator that feeds the attention output back into its state."""
    config, params = config_and_params("translator")
    step, arguments = make_step(build(config)), dict(num_tokens=5, lengths=LENGTHS)
    out = generate(step, params, PROMPT, initial_state("translator"), **arguments)
    beams = beam_search(step, params, PROMPT, initial_state("translator"), num_beams=1, **arguments)
    np.testing.assert_array_equal(np.asarray(beams.tokens)[:, 0], out.tokens)


@pytest.mark.slow
def test_cache_has_requested_capacity_and_dtype():
    config, params = config_and_params("decoder")
    state = init_decode_state(config, params, ROWS, CAPACITY, dtype=jnp.bfloat16)
    assert state.capacity == CAPACITY
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} >= {jnp.dtype(jnp.bfloat16)}


def test_invalid_decode_state_arguments_raise_error():
    encoder = ModelConfig(**LAYERS, kind="encoder")
    tagger = RecurrentConfig(**SIZES, bidirectional=True)
    for config, arguments, message in (
        (encoder, {}, "kind is 'encoder': it does not generate tokens"),
        (tagger, {}, "bidirectional is True: a bidirectional model has no state"),
        (CONFIGS["translator"], {}, "source is None: this model requires a source"),
        (CONFIGS["encoder-decoder"], {}, "source is None: this model requires a source"),
        (
            CONFIGS["decoder"],
            dict(source=SOURCE),
            r"source has shape \(2, 5\): this model does not accept a source",
        ),
        (
            CONFIGS["window"],
            dict(source=SOURCE),
            r"source has shape \(2, 5\): this model does not accept a source",
        ),
        (CONFIGS["rnn"], dict(source_valid=SOURCE_VALID), "source_valid requires a source"),
        (CONFIGS["translator"], dict(source=SOURCE[:1]), "source has 1 rows, but batch is 2"),
        (CONFIGS["rnn"], dict(dtype=jnp.int8), "dtype is int8: RecurrentConfig has no cache"),
        (
            CONFIGS["encoder-decoder"],
            dict(source=SOURCE, source_valid=SOURCE),
            r"valid is int32\[2, 5\]: must be bool\[2, 5\], the shape of source",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            init_decode_state(config, {}, ROWS, CAPACITY, **arguments)
    for config in (CONFIGS["window"], CONFIGS["ngram"], CONFIGS["rnn"]):
        with pytest.raises(ValueError, match="batch is -1: must be an integer of at least 0"):
            init_decode_state(config, {}, -1, CAPACITY)


@pytest.mark.slow
def test_equal_steps_are_equal_and_hash_equal():
    one, two = (make_step(build(dataclasses.replace(CONFIGS["window"]))) for _ in range(2))
    assert one == two and hash(one) == hash(two)
