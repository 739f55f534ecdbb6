"""Tests of positional encodings against float64 NumPy and published numbers."""

from __future__ import annotations

import dataclasses
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import oracle
from tests.support.tolerances import (
    FORWARD_F32,
    GRADIENT_F32,
    assert_near,
    assert_same_bits,
    largest_error,
)
from transformer_jax.attention import biases
from transformer_jax.config import ConfigError, ModelConfig, Rope
from transformer_jax.models import positions as pos
from transformer_jax.models.factory import build, init_params

pytestmark = pytest.mark.usefixtures("quick_compilation")

FAR = np.array([0, 1, 257, 4095, 131_071, 10**6, 10**7, 10**8 + 1, 2**31 - 1, -(10**7)], np.int32)
B, T, S, N, H = 2, 5, 7, 3, 10
LONG = dict(factor=8.0, original_len=4096)
ROTATIONS = {
    "plain": Rope(),
    "interleaved": Rope(pairing="interleaved"),
    "linear": Rope(scaling="linear", factor=4.0),
    "ntk": Rope(scaling="ntk", factor=4.0),
    "dynamic": Rope(scaling="dynamic", length=9001, **LONG),
    "llama3": Rope(scaling="llama3", base=500_000.0, factor=8.0, original_len=8192),
    "yarn": Rope(scaling="yarn", **LONG),
    "yarn-unrounded": Rope(scaling="yarn", truncate=False, **LONG),
}


def frequency(config: Rope, k: int, dims: int) -> float:
    """Return the radians per position of pair k, from the formula of each paper."""
    base, s, length = config.base, config.factor, config.original_len
    if config.scaling == "ntk":
        return (base * s ** (dims / (dims - 2))) ** (-2 * k / dims)
    if config.scaling == "dynamic":
        s = s * max(length, config.length or 0) / length - (s - 1)
        return (base * s ** (dims / (dims - 2))) ** (-2 * k / dims)
    w = base ** (-2 * k / dims)
    if config.scaling == "linear":
        return w / s
    if config.scaling == "llama3":
        wavelength = 2 * math.pi / w
        if wavelength < length / config.high_freq_factor:
            return w
        if wavelength > length / config.low_freq_factor:
            return w / s
        smooth = length / wavelength - config.low_freq_factor
        smooth /= config.high_freq_factor - config.low_freq_factor
        return (1 - smooth) * w / s + smooth * w
    if config.scaling == "yarn":

        def pair_of(turns: float) -> float:
            return dims * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = pair_of(config.beta_fast), pair_of(config.beta_slow)
        if config.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        gamma = 1.0 if k <= low else 0.0 if k >= high else 1 - (k - low) / (high - low)
        return (1 - gamma) * w / s + gamma * w
    if config.scaling == "longrope":
        near = config.length is None or config.length <= length
        return w / (config.short_factors if near else config.long_factors)[k]
    return w


def magnitude(config: Rope) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    if config.scaling == "longrope":
        return math.sqrt(1 + math.log(config.factor) / math.log(config.original_len))
    return 0.1 * math.log(config.factor) + 1 if config.scaling == "yarn" else 1.0


def rotated(x: np.ndarray, positions: np.ndarray, config: Rope) -> np.ndarray:
    """Rotate pairs as complex numbers times e^{i p w}; x is [B, T, N, H], positions [B, T]."""
    x = oracle.double(x)
    out, dims = x.copy(), config.dims or x.shape[-1]
    for k in range(dims // 2):
        i, j = (k, k + dims // 2) if config.pairing == "half" else (2 * k, 2 * k + 1)
        turn = magnitude(config) * np.exp(1j * positions * frequency(config, k, dims))
        pair = (x[..., i] + 1j * x[..., j]) * turn[..., None]
        out[..., i], out[..., j] = pair.real, pair.imag
    return out


def assert_frequencies_are_those_of_the_paper(config: Rope, width: int) -> None:
    w, factor = pos.rope_frequencies(config, width)
    dims = config.dims or width
    expected = np.array([frequency(config, k, dims) for k in range(dims // 2)])
    assert w.dtype == np.float32 and w.shape == expected.shape
    assert (np.abs(w / expected - 1) <= 2.0**-24 * 1.001).all()
    assert factor == pytest.approx(magnitude(config), abs=1e-12)


def inside_unit_circles(rng, *shape: int) -> np.ndarray:
    return rng.uniform(-1, 1, shape).astype(np.float32) / np.float32(math.sqrt(2))


@pytest.mark.slow
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotation_is_exact_at_every_position(rng, pairing, dtype):
    config = Rope(pairing=pairing)
    x = jnp.asarray(inside_unit_circles(rng, 1, len(FAR), N, 64)).astype(dtype)
    actual = pos.apply_rope(x, jnp.asarray(FAR), config)
    assert actual.dtype == x.dtype
    expected = rotated(x, FAR[None], config)
    for t, position in enumerate(FAR.tolist()):
        rounding = 0.0 if dtype == "float32" else 2.0**-8 * np.abs(expected[:, t]).max()
        error = largest_error(actual[:, t], expected[:, t])
        assert error <= 1e-6 + rounding, f"position {position}: {error}"


@pytest.mark.slow
@pytest.mark.parametrize("shift", [4_000, 100_000, 10**8, 2**31 - 12])
def test_rotated_scores_depend_only_on_distance(rng, shift):
    q, k = (inside_unit_circles(rng, 1, 11, 1, 64) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))

    def scores(start: int) -> np.ndarray:
        positions = start + jnp.arange(11)
        rotate = [pos.apply_rope(jnp.asarray(x), positions, Rope())[0, :, 0] for x in (q, k)]
        return np.asarray(rotate[0] @ rotate[1].T)

    assert largest_error(scores(shift), scores(0)) <= 1e-6
    moved = pos.apply_rope(jnp.asarray(q), jnp.arange(3, 14), Rope())
    assert largest_error(moved, pos.apply_rope(jnp.asarray(q), jnp.arange(11), Rope())) > 0.1


@pytest.mark.slow_except("yarn")
@pytest.mark.parametrize("name", ROTATIONS)
def test_rotary_embedding_matches_paper(rng, name):
    config = ROTATIONS[name]
    x = inside_unit_circles(rng, B, T, N, 64)
    positions = rng.integers(-1, 2048, (B, T)).astype(np.int32)
    actual = jax.jit(pos.apply_rope, static_argnums=2)(x, positions, config)
    bound = 2048 * 2.0**-23 + 2e-6
    assert largest_error(actual, rotated(x, positions, config)) <= bound


@pytest.mark.parametrize("name", ROTATIONS)
@pytest.mark.parametrize("dims", [None, 2, 6])
def test_rotary_frequencies_match_paper(name, dims):
    config = dataclasses.replace(ROTATIONS[name], dims=dims)
    if dims == 2 and config.scaling in ("ntk", "dynamic"):
        assert pos.rope_frequencies(config, H)[0] == [1.0]
    else:
        assert_frequencies_are_those_of_the_paper(config, 128)


def test_rope_scalings_match_published_numbers():
    def w(**settings):
        return pos.rope_frequencies(Rope(**settings), 128)

    plain, _ = w()
    np.testing.assert_allclose(plain[[0, 1, 32, 63]], [1, 0.8659643, 0.01, 1.1547820e-4], rtol=1e-6)
    ntk = w(scaling="ntk", factor=4.0)[0] / plain  # keeps the fastest pair, stretches the slowest
    np.testing.assert_allclose(ntk[[0, -1]], [1, 0.25], rtol=1e-6)
    # Llama 3.1: wavelengths below 2048 are kept, above 8192 divided by 8
    llama, _ = w(base=5e5, scaling="llama3", factor=8.0, original_len=8192)
    ratio = llama / w(base=5e5)[0]
    np.testing.assert_allclose(ratio[:29], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[35:], 1 / 8, rtol=1e-6)
    assert (np.diff(ratio[28:36]) < 0).all()
    # Llama 2 with YaRN: the ramp runs from pair 20 to 46
    yarn = w(scaling="yarn", **LONG)[0] / plain
    assert yarn[20] == 1 and yarn[21] < 1 and yarn[45] > 1 / 8
    np.testing.assert_allclose(yarn[46:], 1 / 8, rtol=1e-6)
    for factor, magnitude_ in ((8.0, 1.2079442), (16.0, 1.2772589), (32.0, 1.3465736)):
        got = w(scaling="yarn", factor=factor, original_len=4096)[1]
        assert got == pytest.approx(magnitude_, abs=1e-7)
    assert w(scaling="yarn", attention_factor=1.5, **LONG)[1] == 1.5
    # Phi-3 mini: 32 times 4096 = 2^12 positions, sqrt(1 + 5/12)
    factors = dict(short_factors=(1.0,) * 64, long_factors=(2.0,) * 64)
    phi = w(scaling="longrope", factor=32.0, original_len=4096, **factors)
    assert phi[1] == pytest.approx(1.1902380714238083, abs=1e-15)
    # dynamic: unchanged up to original_len; at twice that, equal to ntk with 2 s - (s - 1)
    dynamic = dict(scaling="dynamic", factor=3.0, original_len=4096)
    for length in (None, 1, 4096):
        assert_same_bits(w(**dynamic, length=length)[0], plain)
    assert_same_bits(w(**dynamic, length=8192)[0], w(scaling="ntk", factor=4.0)[0])


@pytest.mark.slow
@pytest.mark.parametrize("length", [None, 97, 98])
@pytest.mark.parametrize("given", [None, 1.7])
def test_longrope_divides_each_pair_by_its_factor(rng, length, given):
    """The long factors apply from original_len + 1 on."""
    short, long = (tuple(rng.uniform(1, top, 3).tolist()) for top in (2.0, 40.0))
    config = Rope(
        scaling="longrope", dims=6, original_len=97, factor=5.0, length=length,
        short_factors=short, long_factors=long, attention_factor=given,
    )  # fmt: skip
    assert_frequencies_are_those_of_the_paper(config, H)
    x = inside_unit_circles(rng, B, T, N, H)
    positions = rng.integers(-1, 512, (B, T)).astype(np.int32)
    actual = pos.apply_rope(jnp.asarray(x), jnp.asarray(positions), config)
    assert largest_error(actual, rotated(x, positions, config)) <= 2e-6


@pytest.mark.parametrize("length", [None, 98])
@pytest.mark.parametrize("count", [1, 4])
def test_longrope_with_wrong_number_of_factors_raises_error(length, count):
    """A single factor must not broadcast to all pairs."""
    factors = (2.0,) * count
    config = Rope(
        scaling="longrope", original_len=97, length=length, short_factors=factors,
        long_factors=factors,
    )  # fmt: skip
    with pytest.raises(
        ValueError, match=f"longrope has {count} factors: must be one for each of the 5"
    ):
        pos.rope_frequencies(config, H)


# Settings of released checkpoints: head_dim and fields of Rope.
RELEASED: dict[str, tuple[int, dict]] = {
    "Llama 3.1 8B": (128, dict(base=5e5, scaling="llama3", factor=8.0, original_len=8192)),
    "Llama 3.2 1B": (64, dict(base=5e5, scaling="llama3", factor=32.0, original_len=8192)),
    "llama3, other edges": (
        96, dict(base=1e4, scaling="llama3", factor=5.0, original_len=1021, low_freq_factor=2.5,
                 high_freq_factor=17.0),
    ),
    "Qwen 2.5": (128, dict(base=1e6, scaling="yarn", factor=4.0, original_len=32768)),
    "YaRN Llama 2 128k": (128, dict(base=1e4, scaling="yarn", factor=32.0, original_len=4096)),
    "DeepSeek V2": (
        64, dict(base=1e4, scaling="yarn", factor=40.0, original_len=4096, attention_factor=1.0)
    ),
    "yarn, base 150000": (64, dict(base=1.5e5, scaling="yarn", factor=32.0,
                                            original_len=4096)),
    "gpt-oss": (
        64, dict(base=1.5e5, scaling="yarn", factor=32.0, original_len=4096, truncate=False)
    ),
    "dynamic": (128, dict(base=1e6, scaling="dynamic", factor=2.0, original_len=32768,
                          length=50021)),
    "longrope": (
        8, dict(scaling="longrope", factor=32.0, original_len=4096, length=131072,
                short_factors=(1.0, 1.05, 1.3, 2.0), long_factors=(1.1, 3.7, 21.0, 64.5)),
    ),
    "yarn, other edges": (
        40, dict(base=1e3, scaling="yarn", factor=3.0, original_len=509, beta_fast=7.0,
                 beta_slow=0.2),
    ),
    "yarn, all edges beyond": (10, dict(base=1e4, scaling="yarn", factor=2.0, original_len=3)),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_rotary_frequencies_match_released_checkpoints(name):
    width, settings = RELEASED[name]
    assert_frequencies_are_those_of_the_paper(Rope(**settings), width)


@pytest.mark.slow
def test_rotary_pairings_are_permutations_of_each_other(rng):
    x = inside_unit_circles(rng, B, T, N, H)
    # half layout 0, H/2, 1, ... in interleaved order
    order = np.arange(H).reshape(2, H // 2).T.ravel()
    positions = jnp.arange(3, 3 + T)
    half = pos.apply_rope(jnp.asarray(x), positions, Rope())
    paired = pos.apply_rope(jnp.asarray(x[..., order]), positions, Rope(pairing="interleaved"))
    assert_near(paired, half[..., order], FORWARD_F32)


@pytest.mark.slow_except("dynamic")
@pytest.mark.parametrize("name", ROTATIONS)
def test_rotating_slice_matches_slicing_rotation(rng, name):
    x = inside_unit_circles(rng, B, 11, N, H)
    positions = np.array([[0], [1000]], np.int32) + np.arange(11, dtype=np.int32)
    turn = jax.jit(lambda x, positions: pos.apply_rope(x, positions, ROTATIONS[name]))
    full, alone = turn(x, positions), turn(x[:, 5:9], positions[:, 5:9])
    assert_near(alone, np.asarray(full)[:, 5:9], FORWARD_F32)


@pytest.mark.slow
def test_negative_positions_rotate_backward(rng):
    x = inside_unit_circles(rng, B, T, N, H)
    positions = jnp.asarray([-1, 0, 7, 31, 101])
    there = pos.apply_rope(jnp.asarray(x), positions, Rope())
    assert largest_error(there, x) > 0.1
    assert_near(pos.apply_rope(there, -positions, Rope()), x, FORWARD_F32)


@pytest.mark.slow
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_unrotated_dimensions_do_not_change(rng, pairing):
    x = jnp.asarray(inside_unit_circles(rng, B, T, N, H))
    part = pos.apply_rope(x, jnp.arange(T), Rope(dims=6, pairing=pairing))
    assert_same_bits(part[..., 6:], x[..., 6:])
    alone = pos.apply_rope(x[..., :6], jnp.arange(T), Rope(pairing=pairing))
    assert_near(part[..., :6], alone, FORWARD_F32)


@pytest.mark.slow
def test_rotation_gradient_is_inverse_rotation(rng):
    x, cotangent = (jnp.asarray(inside_unit_circles(rng, B, T, N, H)) for _ in range(2))
    positions = jnp.arange(5, 5 + T)

    def rotate(x, p):
        return pos.apply_rope(x, p, Rope())

    _, vjp = jax.vjp(lambda x: rotate(x, positions), x)
    assert_near(vjp(cotangent)[0], rotate(cotangent, -positions), GRADIENT_F32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_positions_raise_error(dtype):
    with pytest.raises(ValueError, match=dtype):
        pos.sinusoidal(jnp.arange(3).astype(dtype), 4)
    with pytest.raises(ValueError, match=dtype):
        pos.apply_rope(jnp.ones((1, 3, 1, 4)), jnp.arange(3).astype(dtype), Rope())


def test_rotating_more_than_head_dim_raises_error():
    with pytest.raises(ValueError, match=r"dims is 8.*head_dim 6"):
        pos.rope_frequencies(Rope(dims=8), 6)


def test_unknown_positions_error_lists_names():
    known = "'none', 'learned', 'sinusoidal', 'rope', 'shaw', 't5buckets', 'alibi', 't5'"
    told = f"positions is 'rotary': must be one of {known}, or a value such as Rope(base=500.0)"
    with pytest.raises(ConfigError, match=rf"^{re.escape(told)}; did you mean rope\?$"):
        ModelConfig(positions="rotary")


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_sinusoidal_positions_match_formula(layout):
    """The halves layout has all sines first, then all cosines."""
    actual = np.asarray(jax.jit(lambda at: pos.sinusoidal(at, 34, layout=layout))(FAR))
    assert actual.shape == (len(FAR), 34) and actual.dtype == np.float32
    for row, position in enumerate(FAR.tolist()):
        angles = [position / 10_000 ** (2 * i / 34) for i in range(17)]
        sines, cosines = [*map(math.sin, angles)], [*map(math.cos, angles)]
        pairs = [x for pair in zip(sines, cosines, strict=True) for x in pair]
        expected = pairs if layout == "interleaved" else sines + cosines
        assert largest_error(actual[row], expected) <= 1e-6
    with pytest.raises(ValueError, match="dim is 5"):
        pos.sinusoidal(np.arange(3), 5)


@pytest.mark.slow
def test_sinusoids_and_rotations_are_float64_under_x64(rng):
    """Sinusoids and rotations have float64 precision, but the model's logits remain float32."""
    positions = np.array([0, 1, 2, 31, 100_003, 2**31 - 1, -3])
    with jax.enable_x64(True):
        table = np.asarray(pos.sinusoidal(jnp.asarray(positions), 6))
        x = rng.standard_normal((1, len(positions), 1, 6))
        turned = np.asarray(pos.apply_rope(jnp.asarray(x), jnp.asarray(positions), Rope()))
        single = pos.apply_rope(jnp.asarray(x, jnp.float32), jnp.asarray(positions), Rope())
        config = ModelConfig(
            vocab_size=7, d_model=6, num_heads=1, num_layers=1, positions="sinusoidal"
        )
        tokens = jnp.zeros((1, 3), jnp.int32)
        params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
        logits, _ = jax.eval_shape(build(config).apply, {"params": params}, tokens)
    assert (table.dtype, turned.dtype) == (np.float64, np.float64)
    assert (single.dtype, logits.dtype) == (np.float32, np.float32)
    exact = positions.astype(object)
    for i in range(3):
        w = 10_000.0 ** (-2 * i / 6)
        angle = np.array([math.fmod(p * w, 2 * math.pi) for p in exact])
        # the frequency itself has a relative error of 2^-53
        tolerance = 1e-15 + np.abs(positions) * w * 2.0**-51
        cos, sin = np.cos(angle), np.sin(angle)
        assert (np.abs(table[:, 2 * i] - sin) <= tolerance).all()
        assert (np.abs(table[:, 2 * i + 1] - cos) <= tolerance).all()
        u, v = x[0, :, 0, i], x[0, :, 0, i + 3]
        assert (np.abs(turned[0, :, 0, i] - (u * cos - v * sin)) <= 8 * tolerance).all()


@pytest.mark.slow_except("2")
@pytest.mark.parametrize("offset", [0, 2])
def test_learned_positions_select_table_rows_and_zero_padding(rng, offset):
    table = rng.normal(size=(offset + 7, 3)).astype(np.float32)
    positions = np.array([[0, 6, -1], [-100, 2, 2]], np.int32)
    actual, pull = jax.jit(
        lambda table: jax.vjp(lambda x: pos.learned(x, positions, offset), table)
    )(table)
    own = table[offset:]
    expected = np.where(positions[..., None] < 0, 0, own[np.maximum(positions, 0)])
    assert_same_bits(actual, expected)
    count = pull(np.ones_like(actual))[0]
    rows = [0] * offset + [1, 0, 2, 0, 0, 0, 1]
    assert_same_bits(count, np.outer(rows, np.ones(3)).astype(np.float32))


@pytest.mark.parametrize("offset", [0, 2])
def test_position_outside_table_raises_error_or_returns_nan(offset):
    table, positions = jnp.ones((offset + 7, 3)), jnp.asarray([6, 7, -1])
    said = "9 rows, 2 of them before 0" if offset else "7 rows"
    with pytest.raises(ValueError, match=f"^position 7 is outside the table of {said}$"):
        pos.learned(table, positions, offset)
    traced = np.asarray(jax.jit(pos.learned, static_argnums=2)(table, positions, offset))
    assert np.isnan(traced[1]).all()
    assert_same_bits(traced[[0, 2]], np.outer([1, 0], np.ones(3)).astype(np.float32))


# Position biases

PLACES = {
    "shared": (np.arange(4, 4 + T), np.arange(S)),
    "rows": (np.array([[3, 4, 5, 6, 7], [-1, 0, 1, 2, 3]]), np.arange(S)[None].repeat(B, 0) - 1),
    "rows of keys": (np.arange(T), np.array([[9, 8, 7, 6, 5, 4, 3], [0, 1, 2, 300, 4, -1, -1]])),
}


def distances(name: str) -> np.ndarray:  # [B or 1, T, S]
    q, k = (np.atleast_2d(x) for x in PLACES[name])
    return k[:, None, :] - q[:, :, None]


def test_alibi_slopes_match_paper():
    assert_same_bits(biases.alibi_slopes(8), np.float32([2.0**-n for n in range(1, 9)]))
    twelve = [2.0**-n for n in range(1, 9)] + [2.0**-n for n in (0.5, 1.5, 2.5, 3.5)]
    assert_near(biases.alibi_slopes(12), twelve, FORWARD_F32)

    def slopes(n: int) -> list[float]:
        if math.log2(n).is_integer():
            start = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [start * start**i for i in range(n)]
        below = 2 ** math.floor(math.log2(n))
        return slopes(below) + slopes(2 * below)[0::2][: n - below]

    for heads in (1, 2, 3, 5, 7, 8, 13, 16, 24, 31, 40):
        actual = biases.alibi_slopes(heads)
        assert actual.dtype == jnp.float32
        assert_near(actual, slopes(heads), FORWARD_F32)
    with pytest.raises(ValueError, match="num_heads is 0"):
        biases.alibi_slopes(0)


@pytest.mark.slow_except("rows of keys")
@pytest.mark.parametrize("name", PLACES)
def test_alibi_is_minus_slope_times_distance(name):
    slopes = biases.alibi_slopes(N)
    bias = biases.ALiBi(slopes)
    actual = jax.jit(bias.materialize)(*(np.int32(x) for x in PLACES[name]))
    d = distances(name)
    assert actual.shape == (len(d), N, T, S) and actual.dtype == jnp.float32
    expected = -np.abs(d)[:, None] * oracle.double(slopes)[:, None, None]
    assert_near(actual, expected, FORWARD_F32)


@pytest.mark.slow_except("uint32")
@pytest.mark.parametrize("dtype", ["uint8", "uint32"])
def test_relative_distances_support_any_integer_dtype(dtype):
    q, k = np.array([0, 3, 127]), np.array([127, 100, 2, 0])
    at = q.astype(dtype), jnp.asarray(k.astype(dtype))
    assert (np.asarray(jax.jit(biases.key_distances)(*at))[0] == k - q[:, None]).all()


def test_positions_beyond_int32_raise_error():
    with pytest.raises(ValueError, match="k_positions contains 4294967296"):
        biases.ALiBi(biases.alibi_slopes(N)).materialize(np.arange(3), np.array([2**32]))
    with pytest.raises(ValueError, match="positions contains -2147483649"):
        pos.sinusoidal(np.array([-(2**31) - 1]), 4)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (64, 256), (8, 20), (32, 1024)])
def test_relative_position_buckets_match_t5(bidirectional, buckets, longest):
    d = np.arange(-300, 301, dtype=np.int32)
    settings = dict(bidirectional=bidirectional, num_buckets=buckets, max_distance=longest)
    actual = np.asarray(jax.jit(partial(biases.relative_bucket, **settings))(d))
    for distance, got in zip(d.tolist(), actual.tolist(), strict=True):
        settings = dict(bidirectional=bidirectional, buckets=buckets, longest=longest)
        assert got == oracle.t5_bucket(distance, **settings), f"distance {distance}"
    if longest <= 300:
        # the bucket for distance 0 of the upper half is never used, as in the paper's code
        unused = {buckets // 2} if bidirectional else set()
        assert set(actual.tolist()) == set(range(buckets)) - unused


def test_first_distance_in_bucket_maps_to_that_bucket():
    # 8 (128 / 8)^(i / 8) is 16, 32, 64 at i = 2, 4, 6; a rounded logarithm could be too small
    d = np.int32([-15, -16, -31, -32, -63, -64, -127, -128, 16, 64])
    settings = dict(bidirectional=True, num_buckets=32, max_distance=128)
    actual = jax.jit(partial(biases.relative_bucket, **settings))(d)
    assert actual.tolist() == [9, 10, 11, 12, 13, 14, 15, 15, 26, 30]


@pytest.mark.parametrize("settings", [(7, 128), (2, 128), (32, 8)])
def test_invalid_buckets_raise_error(settings):
    buckets, longest = settings
    given = dict(bidirectional=True, num_buckets=buckets, max_distance=longest)
    with pytest.raises(ValueError, match=f"num_buckets is {buckets}, max_distance is {longest}"):
        biases.relative_bucket(jnp.arange(3), **given)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_bias_selects_value_for_bucket(rng, name, bidirectional):
    table = rng.normal(size=(8, N)).astype(np.float32)
    q, k = (jnp.asarray(x, jnp.int32) for x in PLACES[name])
    d = distances(name)
    expected = np.zeros((len(d), N, T, S))
    bucket = np.zeros(d.shape, int)
    for at in np.ndindex(*d.shape):
        bucket[at] = oracle.t5_bucket(
            int(d[at]), bidirectional=bidirectional, buckets=8, longest=20
        )
        expected[at[0], :, at[1], at[2]] = table[bucket[at]]
    cotangent = rng.normal(size=expected.shape).astype(np.float32)

    def materialize(bias):
        return bias.materialize(q, k)

    bias = biases.RelativeBias(jnp.asarray(table), bidirectional, 20)
    actual, vjp = jax.vjp(materialize, bias)
    assert actual.dtype == jnp.float32
    assert_near(actual, expected, FORWARD_F32)
    gradient = np.zeros(table.shape)
    np.add.at(gradient, bucket, np.moveaxis(cotangent.astype(np.float64), 1, -1))
    assert_near(vjp(jnp.asarray(cotangent))[0].table, gradient, GRADIENT_F32)


@pytest.mark.slow
def test_biases_are_pytrees_under_jit():
    q, k = jnp.arange(T), jnp.arange(S)
    traced = jax.jit(lambda bias: bias.materialize(q, k))
    for bias in (
        biases.ALiBi(biases.alibi_slopes(N)),
        biases.RelativeBias(jnp.arange(8.0 * N).reshape(8, N), bidirectional=True, max_distance=20),
    ):
        assert len(jax.tree.leaves(bias)) == 1
        assert_near(traced(bias), bias.materialize(q, k), FORWARD_F32)


# Shaw's vectors

CLIP = 2


@pytest.mark.slow_except("shared")
@pytest.mark.parametrize("name", PLACES)
def test_shaw_attention_and_gradients_match_loops(rng, name):
    q_positions, k_positions = (np.int32(x) for x in PLACES[name])
    query, table = rng.normal(size=(B, T, N, H)), rng.normal(size=(2 * CLIP + 1, H))
    weights, values = rng.random(size=(B, N, T, S)), rng.normal(size=(2 * CLIP + 1, H + 1))
    d_scores, d_out = rng.normal(size=(B, N, T, S)), rng.normal(size=(B, T, N, H + 1))
    row = np.broadcast_to(np.clip(distances(name), -CLIP, CLIP) + CLIP, (B, T, S))
    scores, out = np.zeros((B, N, T, S)), np.zeros((B, T, N, H + 1))
    d_query, d_table = np.zeros(query.shape), np.zeros(table.shape)
    d_weights, d_values = np.zeros(weights.shape), np.zeros(values.shape)
    for b, n, t, s in np.ndindex(B, N, T, S):
        r = row[b, t, s]
        scores[b, n, t, s] = query[b, t, n] @ table[r]
        out[b, t, n] += weights[b, n, t, s] * values[r]
        d_query[b, t, n] += d_scores[b, n, t, s] * table[r]
        d_table[r] += d_scores[b, n, t, s] * query[b, t, n]
        d_weights[b, n, t, s] = d_out[b, t, n] @ values[r]
        d_values[r] += weights[b, n, t, s] * d_out[b, t, n]

    for function, arguments, cotangent, expected, gradients in (
        (pos.shaw_scores, (query, table), d_scores, scores, (d_query, d_table)),
        (pos.shaw_values, (weights, values), d_out, out, (d_weights, d_values)),
    ):

        @jax.jit
        def both(x, table, cotangent, f=function):
            y, vjp = jax.vjp(lambda x, table: f(x, table, q_positions, k_positions), x, table)
            return y, vjp(cotangent)

        actual, slopes = both(*(a.astype(np.float32) for a in (*arguments, cotangent)))
        assert_near(actual, expected, FORWARD_F32)
        for got, want in zip(slopes, gradients, strict=True):
            assert_near(got, want, GRADIENT_F32)


@pytest.mark.slow
def test_shaw_attention_keeps_float32_scores_and_weight_dtype():
    q, k = jnp.arange(T), jnp.arange(S)
    table = jnp.ones((2 * CLIP + 1, H), jnp.bfloat16)
    assert pos.shaw_scores(jnp.ones((B, T, N, H), jnp.bfloat16), table, q, k).dtype == jnp.float32
    weights = jnp.full((B, N, T, S), 1 / S, jnp.bfloat16)
    assert pos.shaw_values(weights, table, q, k).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="table has 4 rows"):
        pos.shaw_values(weights, table[:4], q, k)


@pytest.mark.slow
@pytest.mark.usefixtures("usual_compilation")
def test_shaw_attention_allocates_no_vector_per_pair():
    length, width = 211, 64
    place = jnp.arange(length)

    def like(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def both(query, keys, values):
        weights = jax.nn.softmax(pos.shaw_scores(query, keys, place, place), axis=-1)
        return pos.shaw_values(weights, values, place, place).sum()

    tables = (like(2 * CLIP + 1, width),) * 2
    compiled = jax.jit(jax.grad(both, argnums=(0, 1, 2))).lower(like(1, length, 1, width), *tables)
    memory = compiled.compile().memory_analysis().temp_size_in_bytes
    assert 0 < memory < length * length * width * 4 / 2


def test_rotation_broadcasts_positions_and_accepts_lists():
    """Positions broadcast over tokens and rows."""
    x = np.random.default_rng(5).normal(size=(2, 3, 1, 4)).astype(np.float32)
    several = ([3], [[3], [7]], [[3, 1, 4]])

    @jax.jit
    def turn(x, *wholes):
        found = []
        for given, whole in zip(several, wholes, strict=True):
            forms = whole, given, np.array(given)
            found.append([pos.apply_rope(x, positions, Rope()) for positions in forms])
        return found

    wholes = [np.broadcast_to(np.array(given, np.int32), (2, 3)) for given in several]
    for expected, *others in turn(x, *wholes):
        for actual in others:
            np.testing.assert_array_equal(actual, expected)
    for wrong in (3, [3, 1], [[3], [7], [1]]):
        with pytest.raises(ValueError, match="positions have shape"):
            pos.apply_rope(x, np.array(wrong), Rope())


def test_sinusoid_base_must_be_static():
    wanted = np.asarray(jax.jit(lambda: pos.sinusoidal(jnp.arange(3), 4, 100.0))())
    for base in (np.float32(100), jnp.float32(100), jnp.bfloat16(100)):
        made = jax.jit(lambda base=base: pos.sinusoidal(jnp.arange(3), 4, base))()
        np.testing.assert_array_equal(np.asarray(made), wanted)
    with pytest.raises(ValueError, match=r"base is of type .*Tracer: must be a concrete number"):
        jax.eval_shape(lambda base: pos.sinusoidal(jnp.arange(3), 4, base), 100.0)
