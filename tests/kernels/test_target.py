"""Selection of targets and tiles, and the calls that kernels reject."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import oracle
from tests.support.attention_suite import draw, reference
from tests.support.hopper_kernels import needs_interpreter
from tests.support.plain_kernels import Plain
from tests.support.tolerances import FORWARD_BF16, GRADIENT_BF16, assert_near
from transformer_jax import kernels
from transformer_jax.attention import fused
from transformer_jax.attention.api import dot_product_attention, explain_attention
from transformer_jax.attention.biases import ALiBi, RelativeBias
from transformer_jax.attention.masks import (
    Dense,
    Predicate,
    Segments,
)
from transformer_jax.kernels import Target, ampere, target, using
from transformer_jax.kernels.chips import blocks
from transformer_jax.kernels.contract import Blocks


def test_missing_accelerator_reports_reason():
    arrays = draw(0)
    inputs = arrays["query"], arrays["key"], arrays["value"]
    assert explain_attention(*inputs)["pallas"] == str(target())
    with pytest.raises(NotImplementedError, match="pallas: needs a TPU or an NVIDIA GPU of comp"):
        dot_product_attention(*inputs, implementation="pallas")


def test_kernel_target_applies_only_inside_context():
    with using(Target("tpu", True)):
        assert target() == Target("tpu", True)
    assert isinstance(target(), str)


@pytest.mark.slow
def test_hopper_kernels_have_names_visible_in_profilers():
    x = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)

    def loss(query, key, value):
        out = dot_product_attention(query, key, value, implementation="pallas")
        return out.astype(jnp.float32).sum()

    with using(Target("hopper")):
        traced = str(jax.make_jaxpr(jax.grad(loss))(x, x, x))
    for name in ("forward", "backward_dq", "backward_dkdv"):
        assert f"kernel_name='attention_{name}'" in traced


def attached(monkeypatch, **facts):
    """Return the target for a fake GPU, by default of Hopper."""
    device = SimpleNamespace(**{"compute_capability": "9.0"} | facts)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    return kernels._attached.__wrapped__()


def test_attached_device_reports_multiprocessor_count(monkeypatch):
    part = attached(monkeypatch, device_kind="NVIDIA H200", core_count=60)  # part of a divided GPU
    assert part == Target("hopper", chip="NVIDIA H200", processors=60)
    silent = attached(monkeypatch, device_kind="NVIDIA H100 PCIe")
    assert silent.processors is None
    passed = []

    def record(problem, where, operands, lists, known):
        passed.append(problem.processors)
        return operands.query, jnp.zeros((1, 1, 128))

    monkeypatch.setattr(fused, "fused_attention", record)
    x = jnp.zeros((1, 128, 1, 64), jnp.bfloat16)
    for where in (part, silent):
        with using(where):
            dot_product_attention(x, x, x, implementation="pallas")
    assert passed == [60, 114]


@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "10.0", "10.3", "11.0", "12.0"])
def test_other_gpus_with_mma_use_ampere_kernels(capability, monkeypatch):
    says = dict(device_kind="NVIDIA GPU", compute_capability=capability)
    assert attached(monkeypatch, **says) == Target("ampere", chip="NVIDIA GPU")
    found = attached(monkeypatch, **says, core_count=82)
    assert found == Target("ampere", chip="NVIDIA GPU", processors=82)


@pytest.mark.parametrize("capability", ["7.5", "gfx942", None])
def test_gpus_without_bfloat16_mma_are_rejected(capability, monkeypatch):
    reason = attached(monkeypatch, device_kind="a GPU", compute_capability=capability)
    assert (
        reason
        == f"needs an NVIDIA GPU of compute capability 8 or later, but the device has {capability}"
    )


@pytest.mark.slow
@pytest.mark.long_except("-132", "NVIDIA H20-78", "NVIDIA H200-132")
@pytest.mark.parametrize(
    ("where", "programs"),
    [
        (Target("hopper", chip="NVIDIA H100 PCIe"), 114),
        (Target("hopper", chip="NVIDIA H20"), 78),
        (Target("hopper", chip="NVIDIA H200"), 132),
        (Target("hopper", chip="NVIDIA H200", processors=60), 60),
        (Target("hopper"), 132),
    ],
    ids=lambda x: x.chip if isinstance(x, Target) else str(x),
)
def test_kernel_launches_one_program_per_multiprocessor(where, programs):
    x = jax.ShapeDtypeStruct((2, 4096, 8, 64), jnp.bfloat16)

    def loss(query, key, value):
        out = dot_product_attention(query, key, value, implementation="pallas")
        return out.astype(jnp.float32).sum()

    with using(where):
        traced = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, x, x))
    found = set(re.findall(r"grid=\((\d+),\)", traced))
    assert found == {str(programs)}


PARITY = jax.device_put(np.arange(17, dtype=np.int32) % 2)


@pytest.mark.slow_except("predicate")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(mask=Predicate(lambda q, k: PARITY[q ^ k] > 0)), "look-up from a query and a key"),
        (
            dict(bias=RelativeBias(jnp.ones((8, 4)), max_distance=16, bidirectional=True)),
            "Relative",
        ),
    ],
    ids=["predicate", "bias"],
)
def test_unsupported_options_are_rejected_with_reason(options, reason):
    arrays = draw(0)
    inputs = arrays["query"], arrays["key"], arrays["value"]
    with using(Plain()):
        assert reason in str(explain_attention(*inputs, **options)["pallas"])
        with pytest.raises(NotImplementedError, match=reason):
            dot_product_attention(*inputs, implementation="pallas", **options)
        assert explain_attention(*inputs, bias=ALiBi(jnp.ones(4)))["pallas"] is None


@pytest.mark.parametrize("scale", [jnp.float32(0.5), jnp.ones(4)], ids=["one", "by head"])
def test_array_scale_is_float32_or_wider(scale, monkeypatch):
    monkeypatch.setattr(ampere, "HAS_MMA", True)  # for any installed version of jax
    low, far = (jax.ShapeDtypeStruct((1, 256, 4, H), jnp.bfloat16) for H in (64, 256))
    with using(Target("tpu")):
        assert explain_attention(low, low, low, scale=scale)["pallas"] is None
    for backend in ("hopper", "ampere"):
        with using(Target(backend)):
            assert explain_attention(low, low, low, scale=scale)["pallas"] is None
            reason = str(explain_attention(far, far, far, scale=scale)["pallas"])
        assert reason.startswith("head dims are 512")
        assert (
            "; with a scale that is an array, the kernels get query bfloat16(1, 256, 4, 512), key"
            in reason
        )


@dataclass(frozen=True)
class Narrow(Plain):
    """A backend that multiplies only 16-bit inputs."""

    @property
    def backend(self):
        def refuse(where, nondeterministic, query, key, value):
            return None if jnp.finfo(query.dtype).bits == 16 else "multiplies 16 bits"

        return replace(super().backend, narrow=True, refuse=refuse)


NARROW = [
    *((Narrow(), dtype) for dtype in ("bfloat16", "float16")),
    *(pytest.param(name, "bfloat16", marks=[pytest.mark.long, needs_interpreter])
      for name in ("ampere", "hopper")),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(("where", "dtype"), NARROW)
def test_per_head_scale_is_not_rounded_by_16_bit_kernels(where, dtype):
    if isinstance(where, str):
        where = Target(where, plgpu.InterpretGPUParams())
    arrays = draw(31, dim=32, value_dim=32, dtype=dtype)
    names, scale = ("query", "key", "value"), np.float32([0.3, 1.7, -0.2, 0.0])

    def attend(*arrays):
        return dot_product_attention(
            *arrays[1:], scale=arrays[0], return_lse=True, implementation="pallas"
        )

    @jax.jit
    def run(*inputs):
        (out, lse), pull = jax.vjp(attend, *inputs)
        return out, lse, *pull((arrays["out_cotangent"], jnp.zeros_like(lse)))

    with using(where):
        out, lse, dscale, *slopes = run(jnp.asarray(scale), *(arrays[x] for x in names))
    host = {name: oracle.double(x) for name, x in arrays.items()}
    raw, host["lse_cotangent"] = host["query"], 0 * host["lse_cotangent"]
    host["query"] = raw * scale[:, None]
    expected = reference(host, scale=1.0)
    assert_near(lse, expected["lse"], 2.0**-16)  # a query rounded to 8 bits would give 2^-9
    assert_near(out, expected["out"], FORWARD_BF16)
    by_hand = (expected["dquery"] * raw).sum(axis=(0, 1, 3))
    expected["dquery"] = expected["dquery"] * scale[:, None]
    for name, slope in zip(names, slopes, strict=True):
        assert_near(slope, expected[f"d{name}"], GRADIENT_BF16)
    assert np.abs(dscale - by_hand).max() < GRADIENT_BF16 * np.abs(by_hand).max()


def test_short_sequences_use_shorter_tiles():
    tiles = Blocks(512, 1024, 3, slack=8.0)
    where = Target("tpu", blocks=(("forward", tiles),))
    assert blocks(where, "forward", 64, 64, 2, 2000, 2000) == tiles
    assert blocks(where, "forward", 64, 64, 2, 200, 1000) == replace(tiles, q=256)


def test_excessively_long_tile_lists_are_rejected_before_launch():
    shape = jax.ShapeDtypeStruct((1, 2**18, 1, 64), jnp.float32)
    with using(Target("tpu")):
        assert "lists of 1 x 512 x 512 tiles" in str(
            explain_attention(shape, shape, shape)["pallas"]
        )
        half = jax.ShapeDtypeStruct((1, 2**17, 1, 64), jnp.float32)
        assert explain_attention(half, half, half)["pallas"] is None
        heads = jax.ShapeDtypeStruct((1, 2**15, 64, 64), jnp.float32)
        mask = Dense(jax.ShapeDtypeStruct((1, 64, 2**15, 2**15), jnp.bool_))
        reason = explain_attention(heads, heads, heads, mask=mask)["pallas"]
        assert "lists of 64 x 64 x 64 tiles" in str(reason)


@pytest.mark.slow
def test_excessively_long_decode_list_falls_back_to_forward_kernel():
    def decoded(batch, queries=1):
        cache = jax.ShapeDtypeStruct((batch, 2**15, 8, 128), jnp.bfloat16)
        query = jax.ShapeDtypeStruct((batch, queries, 32, 128), jnp.bfloat16)
        with using(Target("tpu")):
            assert explain_attention(query, cache, cache)["pallas"] is None
            text = str(
                jax.make_jaxpr(partial(dot_product_attention, implementation="pallas"))(
                    query, cache, cache
                )
            )
        return "name=attention_decode" in text

    assert decoded(300) and not decoded(300, queries=17)
    assert not decoded(3100)


@pytest.mark.slow
def test_tile_list_size_is_checked_for_selected_backward_kernel():
    shape = jax.ShapeDtypeStruct((16, 2**14, 1, 64), jnp.float32)
    mask = Segments(jax.ShapeDtypeStruct((16, 2**14), jnp.int32))

    def reason(**tiles):
        with using(Target("tpu", blocks=tuple(tiles.items()))):
            return explain_attention(shape, shape, shape, mask=mask)["pallas"]

    small = Blocks(128, 128)
    assert reason() is None
    assert reason(dq=small, dkdv=small) is None  # the kernels to use if the sums do not fit
    assert "lists of 16 x 128 x 128 tiles" in str(reason(single_pass_rows=small))


@pytest.mark.slow
def test_error_names_unknown_target():
    for name in ("gpu", "blackwell"):
        message = f"name='{name}' must be 'tpu', 'hopper', 'ampere' or 'cpu'"
        with pytest.raises(ValueError, match=message):
            _ = Target(name).backend
