"""Tests of converted PyTorch GRUs: float64 formulas, and English words with trained weights.

Set G2P_WEIGHTS to the checkpoint20.npz of Kyubyong/g2p to run the tests with trained weights.
"""

import os

import jax
import numpy as np
import pytest

from transformer_jax.decoding.batch_rows import fork
from transformer_jax.decoding.beams import beam_search
from transformer_jax.decoding.generation import generate
from transformer_jax.decoding.step import make_step
from transformer_jax.lectures.g2p import (
    END,
    LETTERS,
    SOUNDS,
    START,
    gru_cell,
    letters,
    read_g2p,
    sounds,
)
from transformer_jax.models.factory import build, init_params
from transformer_jax.pretrained.safetensors_folder import CheckpointError

pytestmark = pytest.mark.usefixtures("quick_compilation")

NAMES = "w_ih", "w_hh", "b_ih", "b_hh"


def weights(seed=0, source=13, target=11, embed=5, hidden=7):
    rng = np.random.default_rng(seed)
    shapes = dict(enc_emb=(source, embed), dec_emb=(target, embed), fc_w=(target, hidden))
    shapes["fc_b"] = (target,)
    for side in ("enc", "dec"):
        shapes |= {f"{side}_w_ih": (3 * hidden, embed), f"{side}_w_hh": (3 * hidden, hidden)}
        shapes |= {f"{side}_b_ih": (3 * hidden,), f"{side}_b_hh": (3 * hidden,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def cell(x, h, w_ih, w_hh, b_ih, b_hh):
    """Compute torch.nn.GRUCell by the formulas of its documentation."""
    H = len(h)
    gi, gh = w_ih @ x + b_ih, w_hh @ h + b_hh
    r, z = sigmoid(gi[:H] + gh[:H]), sigmoid(gi[H : 2 * H] + gh[H : 2 * H])
    n = np.tanh(gi[2 * H :] + r * gh[2 * H :])
    return (1 - z) * n + z * h


def plain(arrays, source, target):
    """Return the logits f64[T, V] of one row, token by token."""
    a = {name: value.astype(np.float64) for name, value in arrays.items()}
    h = np.zeros(a["fc_w"].shape[1])
    for token in source:
        h = cell(a["enc_emb"][token], h, *(a[f"enc_{n}"] for n in NAMES))
    logits = []
    for token in target:
        h = cell(a["dec_emb"][token], h, *(a[f"dec_{n}"] for n in NAMES))
        logits.append(a["fc_w"] @ h + a["fc_b"])
    return np.array(logits)


@pytest.mark.slow
def test_converted_weights_match_formulas(rng):
    arrays = weights()
    config, params = read_g2p(arrays)
    assert (config.vocab_size, config.source_vocab_size) == (11, 13)
    assert (config.d_embed, config.d_hidden, config.cell) == (5, 7, "gru")
    want = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    shapes = [jax.tree.map(lambda leaf: leaf.shape, tree) for tree in (params, want)]
    assert shapes[0] == shapes[1]
    source, target = rng.integers(0, 13, (3, 6)), rng.integers(0, 11, (3, 4))
    lengths = np.array([6, 1, 4])
    valid = np.arange(6)[None] < lengths[:, None]
    logits, _ = build(config).apply({"params": params}, target, source=source, source_valid=valid)
    for row in range(3):
        expected = plain(arrays, source[row, : lengths[row]], target[row])
        assert expected.std() > 0.5
        np.testing.assert_allclose(logits[row], expected, atol=1e-5)


def test_gru_cell_stores_both_candidate_biases():
    arrays = weights()
    found = gru_cell(*(arrays[f"enc_{name}"] for name in NAMES))
    assert {name: set(leaves) for name, leaves in found.items()} == {
        "ir": {"kernel", "bias"}, "iz": {"kernel", "bias"}, "in": {"kernel", "bias"},
        "hr": {"kernel"}, "hz": {"kernel"}, "hn": {"kernel", "bias"},
    }  # fmt: skip
    np.testing.assert_array_equal(found["in"]["bias"], arrays["enc_b_ih"][14:])
    np.testing.assert_array_equal(found["hn"]["bias"], arrays["enc_b_hh"][14:])
    assert found["iz"]["kernel"].shape == (5, 7) and found["hn"]["kernel"].shape == (7, 7)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("enc_emb", None, "array enc_emb is missing"),
        ("dec_b_hh", None, "array dec_b_hh is missing"),
        ("fc_w", np.zeros(7), r"fc_w has shape \[7\]: must be a matrix"),
        ("dec_emb", np.zeros((11, 6)), r"dec_emb has shape \[11, 6\]: must be \[11, 5\]"),
        ("enc_w_hh", np.zeros((7, 21)), r"enc_w_hh has shape \[7, 21\]: must be \[21, 7\]"),
    ],
)
def test_array_with_wrong_shape_is_rejected(name, value, message):
    arrays = weights()
    if value is None:
        del arrays[name]
    else:
        arrays[name] = value
    with pytest.raises(CheckpointError, match=message):
        read_g2p(arrays)


def test_words_are_encoded_as_letters_and_end_token():
    source, valid = letters(["Cab", "a!"])
    np.testing.assert_array_equal(source, [[5, 3, 4, 2], [3, 1, 2, 0]])
    np.testing.assert_array_equal(valid, [[True] * 4, [True] * 3 + [False]])
    assert (len(LETTERS), len(SOUNDS), START, END) == (29, 74, 2, 3)
    assert sounds(np.array([37, SOUNDS.index("IY1"), END, -1])) == ["HH", "IY1"]


# Trained weights

SPOKEN = {
    "checkpoint": "CH EH1 K P OY2 N T",
    "hello": "HH EH1 L OW0",
    "transformer": "T R AE0 N S F AO1 R M ER0",
    "queue": "K Y UW1",
    "activation": "AE2 K T IH0 V EY1 SH AH0 N",
}


@pytest.fixture(scope="module")
def spoken():
    path = os.environ.get("G2P_WEIGHTS")
    if path is None:
        pytest.skip("set G2P_WEIGHTS to a file of trained weights")
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    config, params = read_g2p(arrays)
    source, valid = letters(list(SPOKEN))
    model = build(config)
    state = model.apply({"params": params}, source, valid=valid, method="init_state")
    start = np.full((len(SPOKEN), 1), START)
    return arrays, (make_step(model), params, start), state


def test_english_words_have_expected_phonemes(spoken):
    arrays, begin, state = spoken
    found = generate(*begin, fork(state, 1), num_tokens=20, stop=END)
    for word, row in zip(SPOKEN, found.rows(), strict=True):
        assert " ".join(sounds(row)) == SPOKEN[word]
        source = [LETTERS.index(c) for c in word] + [LETTERS.index("</s>")]
        logits = plain(arrays, source, [START, *row[:-1]])
        assert logits.argmax(axis=1).tolist() == row.tolist()


def test_beam_search_scores_no_worse_than_greedy(spoken):
    _, begin, state = spoken
    greedy = generate(*begin, fork(state, 1), num_tokens=20, stop=END)
    beams = beam_search(*begin, fork(state, 1), num_tokens=20, num_beams=5, num_results=2, stop=END)
    assert (np.asarray(beams.log_probs[:, 0]) >= np.asarray(greedy.log_probs).sum(1) - 1e-4).all()
    assert (np.asarray(beams.lengths) > 1).all()
    for row, length in zip(beams.tokens[:, 0], beams.lengths[:, 0], strict=True):
        assert row[length - 1] == END
