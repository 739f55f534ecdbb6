"""Memory of captures: nothing without a capture, otherwise the captured layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import transformer_jax as tj

T, D, L = 2039, 64, 12
RESIDUAL = T * D * 4
"""Size of one captured residual in bytes."""


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_capturing_one_layer_uses_memory_for_one_layer(scan):
    """Compare the output and temporary sizes of the compiled programs."""
    config = tj.ModelConfig(
        vocab_size=31, d_model=D, num_layers=L, num_heads=2, d_ff=D, max_len=T, positions=None,
        scan_layers=scan,
    )  # fmt: skip
    model = tj.build(config)
    params = jax.eval_shape(lambda: tj.init_params(config, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((1, T), jnp.int32)

    def compiled(capture: tuple[str, ...] | None):
        given = {} if capture is None else {"capture": capture}

        def run(params, tokens):
            found = model.apply({"params": params}, tokens, **given)
            return found[0][:, -1], found[2] if capture else {}

        return jax.jit(run).lower(params, tokens).compile()

    def residuals(capture: tuple[str, ...] | None) -> float:
        """Return the memory of a program, as a number of residuals."""
        found = compiled(capture).memory_analysis()
        return (found.temp_size_in_bytes + found.output_size_in_bytes) / RESIDUAL

    without_argument, none = residuals(None), residuals(())
    assert none == without_argument
    assert none <= residuals(("block_5/residual",)) < none + 1.05
    assert residuals(("block_*/residual",)) > none + L / 2
