"""Images of digits and sequences of tones that are generated from a seed.

A glyph is one of ten 5 x 7 bitmaps at a random position in an 8 x 8 image. The brightness a is
uniform in [0.5, 1), and the noise is normal with standard deviation s:

    image = a bitmap + noise

A letter is a tone of 200 + 150 i Hz, sampled at 4000 Hz, between two silences. Frame t contains 16
log energies, each averaged over four adjacent frequencies:

    e[t, b] = log(1e-3 + mean over k in 4b + 1 .. 4b + 4 of |X[t, k]|^2 / n)

where X[t] is the Fourier transform of n = 128 Hann-windowed samples that start at sample 64 t.
"""

from __future__ import annotations

import importlib.util
import zipfile
from typing import Any, NamedTuple

import numpy as np
from einops import rearrange

from transformer_jax.config.inputs import Patches
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.values import short_repr

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
"""Bitmap of each digit, as seven rows of five pixels."""

RATE = 4000
"""Sampling rate in Hz."""

WINDOW, HOP = 128, 64
"""Length of a frame and distance between frames, in samples."""

BINS = 4
"""Number of adjacent frequencies that are averaged for a feature."""

TONE = 4 * HOP, 8 * HOP
"""Minimum and maximum length of a tone, in samples."""

SILENCE = 2 * HOP, 4 * HOP
"""Minimum and maximum length of a silence, in samples."""


@short_repr
class Signal(NamedTuple):
    """Image or frames of a sound, together with the target text."""

    values: np.ndarray  # f32[H, W, C] or f32[T, D_in]
    target: str


def make_signals(task: Any, seed: int) -> list[Signal]:
    """Return the signals of a task in random order.

    Args:
        task: a `DigitsTask` or `TonesTask`, whose `examples` is the maximum number of signals.
        seed: seed of the random numbers.

    Raises:
        DataError: If the task uses scikit-learn's digits and scikit-learn is not installed.
    """
    random = np.random.Generator(np.random.Philox(seed))
    signals: list[Signal] = []
    if not isinstance(task.inputs, Patches):  # sequences of letters, each with its own tone
        for _ in range(task.examples):
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
            text = "".join(chr(97 + int(letter)) for letter in letters)
            signals.append(Signal(log_energies(sound), text))
        return signals
    if task.source == "scikit-learn":  # Alpaydin and Kaynak 1998
        if importlib.util.find_spec("sklearn") is None:
            rule = "it is not installed; install it or use source 'glyphs'"
            raise DataError(f"source is 'scikit-learn': {rule}")
        from sklearn.datasets import load_digits

        data = load_digits()
        pictures = (data.images / 16).astype(np.float32)[:, :, :, None]  # pixels from 0 to 16
        order = random.permutation(len(pictures))[: task.examples]
        return [Signal(pictures[i], DIGITS[int(data.target[i])]) for i in order]
    for _ in range(task.examples):  # digits at random positions, with random brightness and noise
        digit = int(random.integers(len(DIGITS)))
        bitmap = np.array([[int(pixel) for pixel in row] for row in GLYPHS[digit].split()])
        side = task.inputs.height
        top, left = (int(random.integers(side - size + 1)) for size in bitmap.shape)
        picture = task.noise * random.standard_normal((side, side))
        brightness = random.uniform(0.5, 1.0)
        picture[top : top + bitmap.shape[0], left : left + bitmap.shape[1]] += brightness * bitmap
        signals.append(Signal(picture.astype(np.float32)[:, :, None], DIGITS[digit]))
    return signals


def read_signals(task: Any, path: str, *, targets: bool = True) -> list[Signal]:
    """Read signals from a .npz file.

    The file contains these arrays:

    - `inputs`: numbers, either images [N, 8, 8, 1] or [N, 8, 8], or frames [N, T, 16].
    - `lengths`: integers [N], the number of frames of each sound. This array is optional. By
      default, every sound has T frames.
    - `targets`: str[N], the target texts.

    Args:
        task: a `DigitsTask` or a `TonesTask`.
        path: path of the file.
        targets: whether to read the targets. If not, they are "".

    Raises:
        DataError: If an array is missing or invalid.
    """
    arrays: dict[str, np.ndarray] = {}
    try:
        # NumPy would also read other formats, whose result is not a set of named arrays
        if zipfile.is_zipfile(path):
            # a pickled object could run any code when it is loaded
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
    except Exception:  # NumPy, zipfile, and zlib raise different types for a damaged file
        arrays = {}
    if not arrays or not all(isinstance(array, np.ndarray) for array in arrays.values()):
        raise DataError(f"{path} must be a .npz file of arrays, without Python objects")
    if "inputs" not in arrays:
        raise DataError(f"{path} has no array named inputs, only {sorted(arrays)}")
    inputs, picture = arrays["inputs"], isinstance(task.inputs, Patches)
    shape = task.inputs.row_shape(inputs.shape[1] if inputs.ndim > 1 else 1)
    if picture and inputs.shape[1:] == shape[:2]:
        inputs = inputs[..., None]
    if inputs.dtype.kind not in "fiu" or not inputs.size or inputs.shape[1:] != shape:
        wanted = ", ".join(map(str, shape if picture else ("T", *shape[1:])))
        raise DataError(f"{path}: inputs is {_described(inputs)}: must be numbers [N, {wanted}]")
    with np.errstate(over="ignore"):  # overflow becomes infinity, which is rejected
        inputs = inputs.astype(np.float32)
    count = len(inputs)
    lengths = arrays.get("lengths", np.full(count, inputs.shape[1]))
    if picture and "lengths" in arrays:
        raise DataError(f"{path}: lengths must be absent, because pictures have no length")
    if lengths.shape != (count,) or not np.issubdtype(lengths.dtype, np.integer):
        raise DataError(f"{path}: lengths is {_described(lengths)}: must be integers [{count}]")
    wrong = np.flatnonzero((lengths < 1) | (lengths > inputs.shape[1]))
    if len(wrong):
        rule = f"must be from 1 to the {inputs.shape[1]} frames of inputs"
        raise DataError(f"{path}: lengths[{wrong[0]}] is {lengths[wrong[0]]}: {rule}")
    for number, (row, length) in enumerate(zip(inputs, lengths, strict=True)):
        if not np.isfinite(row[:length]).all():
            raise DataError(f"{path}: inputs[{number}] contains a number that is not finite")
    written = [""] * count
    if targets:
        if "targets" not in arrays:
            raise DataError(f"{path} has no array named targets, only {sorted(arrays)}")
        texts = arrays["targets"]
        if texts.shape != (count,) or texts.dtype.kind != "U":
            raise DataError(f"{path}: targets is {_described(texts)}: must be strings [{count}]")
        letters = {chr(97 + i) for i in range(getattr(task, "letters", 0))}
        for number, target in enumerate(texts.tolist()):
            right = target in DIGITS if picture else target and set(target) <= letters
            if not right:
                rule = f"must be letters from a to {max(letters, default='')}"
                rule = f"must be one of {', '.join(DIGITS)}" if picture else rule
                raise DataError(f"{path}: targets[{number}] is {target!r}: {rule}")
        written = [str(target) for target in texts]
    if picture:
        return [Signal(*pair) for pair in zip(inputs, written, strict=True)]
    rows = zip(inputs, lengths, written, strict=True)
    return [Signal(row[:length], target) for row, length, target in rows]


def _described(array: np.ndarray) -> str:
    return f"{array.dtype}{list(array.shape)}"


def log_energies(sound: np.ndarray) -> np.ndarray:  # f64[samples] -> f32[T, 16]
    """Return the log energies defined above, with T = 1 + floor((samples - 128) / 64)."""
    windows = np.lib.stride_tricks.sliding_window_view(sound, WINDOW)[::HOP]
    # frequency 0 is the mean, which contains no information about the tone
    spectrum = np.fft.rfft(windows * np.hanning(WINDOW))[:, 1:]
    power = rearrange(np.abs(spectrum) ** 2 / WINDOW, "T (D k) -> T D k", k=BINS)
    return np.log(1e-3 + power.mean(axis=2)).astype(np.float32)
