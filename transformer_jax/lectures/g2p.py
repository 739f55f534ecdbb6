"""Conversion of g2pE (Park & Kim 2019, Apache-2.0), a GRU that maps English letters to phonemes.

The published weights are plain arrays in PyTorch's layout. A cell of width H has the arrays

    w_ih [3 H, E], w_hh [3 H, H], b_ih [3 H], b_hh [3 H] with the gates r, z, n stacked

and flax has the kernels `ir`, `iz`, `in` and `hr`, `hz`, `hn`, each [inputs, H]. For the gates r
and z, only the sum of the two biases matters, so flax stores the sum. The candidate n = tanh(W x +
b + r (U h + u)) needs both biases because r multiplies u.

    with np.load("checkpoint20.npz") as arrays:
        config, params = read_g2p(arrays)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from transformer_jax.lectures.recurrent import RecurrentConfig
from transformer_jax.pretrained.safetensors_folder import CheckpointError
from transformer_jax.pytree import Params

LETTERS = ("<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz")
"""Source tokens in ID order. A word ends with </s>."""

SOUNDS = (
    "<pad>", "<unk>", "<s>", "</s>", "AA0", "AA1", "AA2", "AE0", "AE1", "AE2", "AH0", "AH1", "AH2",
    "AO0", "AO1", "AO2", "AW0", "AW1", "AW2", "AY0", "AY1", "AY2", "B", "CH", "D", "DH", "EH0",
    "EH1", "EH2", "ER0", "ER1", "ER2", "EY0", "EY1", "EY2", "F", "G", "HH", "IH0", "IH1", "IH2",
    "IY0", "IY1", "IY2", "JH", "K", "L", "M", "N", "NG", "OW0", "OW1", "OW2", "OY0", "OY1", "OY2",
    "P", "R", "S", "SH", "T", "TH", "UH0", "UH1", "UH2", "UW", "UW0", "UW1", "UW2", "V", "W", "Y",
    "Z", "ZH",
)  # fmt: skip
"""Target tokens in ID order, which are ARPAbet symbols with stress (CMUdict)."""

START, END = SOUNDS.index("<s>"), SOUNDS.index("</s>")
"""First and last tokens of a target."""


def read_g2p(arrays: Mapping[str, np.ndarray]) -> tuple[RecurrentConfig, Params]:
    """Convert the published arrays to a config and the parameters for `build(config)`.

    The arrays are enc_emb, dec_emb, fc_w, fc_b, and the arguments of `gru_cell` for each cell, with
    the prefixes enc_ and dec_. Raises CheckpointError if an array is missing or has the wrong
    shape.
    """
    letters, embed = _shape(arrays, "enc_emb")
    sounds, hidden = _shape(arrays, "fc_w")
    _check(arrays, "dec_emb", (sounds, embed))
    _check(arrays, "fc_b", (sounds,))
    cells = {}
    for side in ("enc", "dec"):
        shapes = dict(
            w_ih=(3 * hidden, embed), w_hh=(3 * hidden, hidden), b_ih=(3 * hidden,),
            b_hh=(3 * hidden,),
        )  # fmt: skip
        for name, shape in shapes.items():
            _check(arrays, f"{side}_{name}", shape)
        cells[side] = gru_cell(*(arrays[f"{side}_{name}"] for name in shapes))
    config = RecurrentConfig(
        vocab_size=sounds, source_vocab_size=letters, d_embed=embed, d_hidden=hidden, cell="gru"
    )
    return config, {
        "encoder": {"tokens": arrays["enc_emb"], "cell_0": cells["enc"]},
        "embed": {"tokens": arrays["dec_emb"], "output": arrays["fc_w"], "bias": arrays["fc_b"]},
        "decoder": {"cell_0": cells["dec"]},
    }


def gru_cell(
    w_ih: np.ndarray,  # [3 H, E]
    w_hh: np.ndarray,  # [3 H, H]
    b_ih: np.ndarray,  # [3 H]
    b_hh: np.ndarray,  # [3 H]
) -> dict[str, dict[str, np.ndarray]]:
    """Convert the parameters of torch.nn.GRUCell to those of flax's GRUCell."""
    x, h = (dict(zip("rzn", np.split(w.T, 3, axis=1), strict=True)) for w in (w_ih, w_hh))
    # torch adds both biases, so flax has only their sum, except for n, where r scales the second
    # one
    b, u = (dict(zip("rzn", np.split(bias, 3), strict=True)) for bias in (b_ih, b_hh))
    return {
        "ir": {"kernel": x["r"], "bias": b["r"] + u["r"]},
        "iz": {"kernel": x["z"], "bias": b["z"] + u["z"]},
        "in": {"kernel": x["n"], "bias": b["n"]},
        "hr": {"kernel": h["r"]},
        "hz": {"kernel": h["z"]},
        "hn": {"kernel": h["n"], "bias": u["n"]},
    }


def letters(words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:  # i32[B, S], bool[B, S]
    """Return the tokens of words, each followed by </s>, and the mask of real tokens."""
    ids_by_letter = {letter: i for i, letter in enumerate(LETTERS)}
    # 1 is <unk>, for example for accented letters and digits
    end = ids_by_letter["</s>"]
    rows = [[*(ids_by_letter.get(c, 1) for c in word.lower()), end] for word in words]
    source = np.zeros((len(rows), max(map(len, rows), default=1)), np.int32)
    for row, ids in zip(source, rows, strict=True):
        row[: len(ids)] = ids
    lengths = np.array([len(ids) for ids in rows])[:, None]
    return source, np.arange(source.shape[1])[None] < lengths


def sounds(tokens: Sequence[int] | np.ndarray) -> list[str]:
    """Return the phonemes of a row of generated tokens, without </s> and padding."""
    return [SOUNDS[token] for token in tokens if token not in (END, -1)]


def _shape(arrays: Mapping[str, np.ndarray], name: str) -> tuple[int, int]:
    """Return the shape of an array. Raise CheckpointError unless it is a matrix."""
    if name not in arrays:
        raise CheckpointError(f"g2p: array {name} is missing")
    shape = arrays[name].shape
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(f"g2p: {name} has shape {list(shape)}: must be a matrix")
    return shape


def _check(arrays: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...]) -> None:
    if name not in arrays:
        raise CheckpointError(f"g2p: array {name} is missing")
    if arrays[name].shape != shape:
        found = list(arrays[name].shape)
        raise CheckpointError(f"g2p: {name} has shape {found}: must be {list(shape)}")
