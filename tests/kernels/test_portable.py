"""The CPU kernels in plain JAX: results, exports, other platforms, derivatives."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.attention_suite import NonfiniteSuite, draw
from tests.support.tolerances import FORWARD_F32, GRADIENT_F32, assert_near
from transformer_jax import ALiBi, Causal, Segments, dot_product_attention, explain_attention
from transformer_jax.attention.api import IMPLEMENTATIONS
from transformer_jax.attention.fused import Native
from transformer_jax.kernels import Target, cpu, portable, using
from transformer_jax.kernels.contract import Blocks

pytestmark = pytest.mark.usefixtures("quick_compilation")
compiled = pytest.mark.skipif(isinstance(cpu.library(), str), reason=str(cpu.library()))


class Elsewhere(Target):
    @property
    def backend(self):
        blocks = lambda kind, *_: Blocks(16, 32 if kind == "forward" else 8)  # noqa: E731
        return replace(cpu.BACKEND, kernels=portable.KERNELS, portable=None, blocks=blocks)


@dataclass(frozen=True)
class Portable(Native):
    """Run the plain kernels here, with small tiles."""

    def target(self):
        return Elsewhere("cpu")


@pytest.mark.slow_except("test_every_mask_matches_reference[dense]")
@pytest.mark.long_except(
    "test_any_sequence_length_matches_reference[17x64]",
    "test_every_mask_matches_reference[dense]",
    "test_fully_masked_rows_are_zero_and_do_not_affect_others",
    "test_rematerialization_does_not_change_gradients_with_dropout",
    "test_masked_keys_and_values_have_no_influence[padding-nan]",
    "test_nonfinite_key_head_affects_exactly_its_group",
)
class TestPortable(NonfiniteSuite):
    implementation = "portable"

    @pytest.fixture(autouse=True)
    def by_name(self, monkeypatch):
        monkeypatch.setitem(IMPLEMENTATIONS, "portable", Portable())


OPTIONS = {
    "causal": dict(),
    "capped": dict(softcap=2.0, sinks=np.float32([0.5, -1.0, 0.0, 2.0])),
    "slopes": dict(bias=ALiBi(np.float32([0.5, 0.25, 0.1, 0.0]))),
}


def inputs(queries=130, keys=130):
    arrays = draw(7, queries=queries, keys=keys)
    return [arrays[name] for name in ("query", "key", "value")]


def loss(name, options):
    def sums(*arrays):
        documents = Segments(jnp.arange(arrays[0].shape[1])[None] // 50)
        mask = Causal() & documents
        out = dot_product_attention(*arrays, mask=mask, implementation=name, **options)
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum()

    return sums


@pytest.mark.slow
@pytest.mark.long_except("capped")
@compiled
@pytest.mark.parametrize("options", OPTIONS)
def test_exported_gradient_matches_original(options):
    """By default, an exported program does not call the library, and runs anywhere."""
    arrays, options = inputs(), OPTIONS[options]
    chosen = explain_attention(*arrays, mask=Causal(), **options).chosen
    assert chosen == "native"
    step = jax.jit(jax.value_and_grad(loss(None, options), (0, 1, 2)))
    assert "transformer_jax_attention" in step.lower(*arrays).as_text(), "the test is of nothing"
    exported = jax.export.export(step, platforms=["cpu", "tpu", "cuda"])(*arrays)
    assert "transformer_jax_attention" not in exported.mlir_module()
    value, gradients = exported.call(*arrays)
    wanted, expected = step(*arrays)
    assert abs(value - wanted) < 1e-5 * abs(wanted) + 1e-4
    for one, own in zip(gradients, expected, strict=True):
        assert_near(one, np.asarray(own, np.float64), GRADIENT_F32)


@pytest.mark.slow
@compiled
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_program_exported_for_other_platform_does_not_call_native_library(platform):
    """Lowered explicitly for a device that is not attached, without a target."""
    step = jax.jit(jax.grad(loss("native", {})))
    text = step.trace(*inputs()).lower(lowering_platforms=(platform,)).as_text()
    assert "transformer_jax_attention" not in text


@pytest.mark.slow_except("target0")
@compiled
@pytest.mark.parametrize("target", [Target("tpu", chip="TPU v5e"), Target("hopper")])
def test_non_cpu_export_target_does_not_use_cpu_kernels(target):
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.float32)
    with using(target):
        explained = explain_attention(x, x, x)
    assert explained.chosen != "native" and "needs a CPU" in explained["native"]


@pytest.mark.slow
@pytest.mark.long_except("capped")
@compiled
@pytest.mark.parametrize("options", OPTIONS)
def test_exported_second_derivatives_match_reference(options):
    """Forward over reverse, reverse over reverse, and `vmap`, which `jax.hessian` uses."""
    arrays, options = inputs(5, 5), OPTIONS[options]
    found, wanted = (
        [
            jax.jit(jax.hessian(loss(name, options), (0, 1)))(*arrays),
            jax.jit(jax.jacrev(jax.grad(loss(name, options)), 2))(*arrays),
        ]
        for name in ("native", "xla")
    )
    for one, own in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert np.asarray(own).any()
        assert_near(one, np.asarray(own, np.float64), GRADIENT_F32)


@pytest.mark.slow
@compiled
def test_vmap_of_exported_program_matches_loop():
    arrays = [jnp.stack([x, 2 * x, x[::-1]]) for x in inputs(20, 20)]
    mapped = jax.jit(jax.vmap(lambda *x: dot_product_attention(*x, implementation="native")))
    found = jax.export.export(mapped)(*arrays).call(*arrays)
    assert_near(found, np.asarray(mapped(*arrays), np.float64), FORWARD_F32)
