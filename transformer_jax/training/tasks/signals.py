"""Make pictures of digits and sequences of tones: every example follows from the seed.

A glyph is one of ten 5 x 7 bitmaps at a random place of an 8 x 8 picture:

    picture = a bitmap + noise,    a uniform in [0.5, 1), noise normal with standard deviation s

A letter of sound is a tone of 200 + 150 i Hz, sampled at 4000 Hz, between two silences. Frame t
holds the logarithms of 16 energies, each of four neighbouring frequencies:

    e[t, b] = log(1e-3 + mean over k in 4b + 1 .. 4b + 4 of |X[t, k]|^2 / n)

where X[t] is the Fourier transform of n = 128 samples from 64 t on, times Hann's window.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import numpy as np
from einops import rearrange

from transformer_jax.config.tasks import ContinuousTask, DigitsTask, TonesTask
from transformer_jax.tokenizers.utf8 import DataError

DIGITS = "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"

GLYPHS = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00010 00100 01000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
"""Seven rows of five pixels for each digit."""

RATE = 4000
"""Samples of a second of sound."""

WINDOW, HOP = 128, 64
"""Samples of a frame, and from one frame to the next."""

BINS = 4
"""Neighbouring frequencies whose energies are one number of a frame."""

TONE = 4 * HOP, 8 * HOP
"""Samples of a tone, at least and at most."""

SILENCE = 2 * HOP, 4 * HOP
"""Samples of a silence, at least and at most."""


class Signal(NamedTuple):
    """Hold a picture or the frames of a sound, and what is to be written of it."""

    values: np.ndarray  # f32[H, W, C] or f32[T, D_in]
    target: str


def make_signals(task: ContinuousTask, seed: int) -> list[Signal]:
    """Return `task.examples` signals in random order, or all there are where they are fewer.

    DataError where scikit-learn's digits are asked for and it is not installed.
    """
    random = np.random.Generator(np.random.Philox(seed))
    if isinstance(task, TonesTask):
        return [_tones(task, random) for _ in range(task.examples)]
    if task.source == "scikit-learn":
        return _handwritten(task, random)
    return [_glyph(task, random) for _ in range(task.examples)]


def _glyph(task: DigitsTask, random: np.random.Generator) -> Signal:
    """Draw a digit at a random place, of random brightness, with noise."""
    digit = int(random.integers(len(DIGITS)))
    bitmap = np.array([[int(pixel) for pixel in row] for row in GLYPHS[digit].split()])
    side = task.inputs.height
    top, left = (int(random.integers(side - size + 1)) for size in bitmap.shape)
    picture = task.noise * random.standard_normal((side, side))
    brightness = random.uniform(0.5, 1.0)
    picture[top : top + bitmap.shape[0], left : left + bitmap.shape[1]] += brightness * bitmap
    return Signal(picture.astype(np.float32)[:, :, None], DIGITS[digit])


def _handwritten(task: DigitsTask, random: np.random.Generator) -> list[Signal]:
    """Return scikit-learn's digits (Alpaydin and Kaynak 1998), with pixels from 0 to 1."""
    if importlib.util.find_spec("sklearn") is None:
        raise DataError("source is 'scikit-learn': it is not installed; glyphs need nothing")
    from sklearn.datasets import load_digits

    found = load_digits()
    pictures = (found.images / 16).astype(np.float32)[:, :, :, None]
    order = random.permutation(len(pictures))[: task.examples]
    return [Signal(pictures[i], DIGITS[int(found.target[i])]) for i in order]


def _tones(task: TonesTask, random: np.random.Generator) -> Signal:
    """Draw letters, and the frames of their tones."""
    length = int(random.integers(task.min_length, task.max_length + 1))
    letters = random.integers(0, task.letters, length)
    parts = [np.zeros(random.integers(SILENCE[0], SILENCE[1] + 1))]
    for letter in letters:
        time = np.arange(random.integers(TONE[0], TONE[1] + 1)) / RATE
        turns = (200 + 150 * letter) * time + random.uniform()
        parts.append(random.uniform(0.5, 1.0) * np.sin(2 * np.pi * turns))
        parts.append(np.zeros(random.integers(SILENCE[0], SILENCE[1] + 1)))
    sound = np.concatenate(parts)
    sound += task.noise * random.standard_normal(len(sound))
    return Signal(log_energies(sound), "".join(chr(97 + int(letter)) for letter in letters))


def log_energies(sound: np.ndarray) -> np.ndarray:  # f64[samples] -> f32[T, 16]
    """Return the logarithms of the energies of a sound in bands of frequencies, frame by frame.

    The equation is that of the module; T is 1 + floor((samples - 128) / 64).
    """
    windows = np.lib.stride_tricks.sliding_window_view(sound, WINDOW)[::HOP]
    spectrum = np.fft.rfft(windows * np.hanning(WINDOW))[:, 1:]
    power = rearrange(np.abs(spectrum) ** 2 / WINDOW, "T (D k) -> T D k", k=BINS)
    return np.log(1e-3 + power.mean(axis=2)).astype(np.float32)
