"""Memory, traffic and time of training on long rows, from formulas.

`plan_training` compiles a step, which takes minutes for a long row on many devices. The formulas
below compare all meshes of `fsdp` and `context` within seconds. They assume `remat="full"`,
`scan_layers`, one row for each device along `fsdp`, and rows in balanced order. With P = context,
t = T / P tokens on a device and w bytes for each number of the compute dtype, a device sends:

    blocks of keys    b = t (K (H + Hv) w + 4) bytes of keys, values and positions. In each layer,
                      P - 1 blocks travel forward, again for `remat`, and backward.
    their gradients   t K (H + Hv) 4 bytes for each of these P - 1 blocks, backward
    parameters        gathered forward and backward, and gradients scattered in float32: (Q - 1) / Q
                      (2 w + 4) bytes for each parameter, with Q = fsdp P

A layer with a window sends only the blocks that the window reaches. Attention by all-to-all, which
runs if it sends fewer bytes than the ring, is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import ConfigError, MeshConfig, ModelConfig, TrainConfig
from transformer_jax.models.flops import step_flops
from transformer_jax.models.quantized import count
from transformer_jax.training.batch import ON_ACCELERATORS, TOKENS_OF_CHUNK
from transformer_jax.training.compiled import make_programs
from transformer_jax.training.planning.hardware import Hardware
from transformer_jax.training.planning.memory import StepMemory, bytes_on_device
from transformer_jax.training.planning.plan import placement_on


@dataclass(frozen=True)
class LengthPlan:
    """Estimate of a training step with rows of a length, on one mesh."""

    hardware: Hardware
    mesh: MeshConfig
    length: int
    memory: StepMemory
    """Memory of a device, with estimated activations."""
    ring: float
    """Bytes of keys, values and their gradients that a device sends in a step."""
    parameters: float
    """Bytes of parameters and gradients that a device sends in a step."""
    flops: float
    """Floating-point operations of a device in a step, including those repeated by `remat`."""

    @property
    def tokens(self) -> int:
        """Return the number of tokens in a step."""
        return self.mesh.row_shards * self.length

    @property
    def fits(self) -> bool:
        """Whether the step fits in the memory of a device."""
        return self.memory.total <= self.hardware.memory

    @property
    def compute(self) -> float:
        """Return the minimum time of the products, in seconds."""
        assert self.hardware.chip is not None
        return self.flops / self.hardware.chip.flops

    @property
    def network(self) -> float:
        """Return the minimum time of the transfers at the link rate, in seconds."""
        assert self.hardware.chip is not None
        return (self.ring + self.parameters) / self.hardware.chip.network

    @property
    def rate(self) -> float:
        """Return the maximum number of tokens per second, if transfers and products overlap."""
        return self.tokens / max(self.compute, self.network)


def plan_lengths(config: TrainConfig, hardware: Hardware, length: int) -> Iterator[LengthPlan]:
    """Yield the plan of each mesh of `fsdp` and `context` whose sizes are powers of two.

    Raises ConfigError if the model is not a decoder with attention in all layers.
    """
    model = config.model
    if not isinstance(model, ModelConfig) or model.kind != "decoder" or model.mixers:
        raise ConfigError("model: a table of lengths needs a decoder with attention in all layers")
    longest = None if model.max_len is None else max(model.max_len, length)
    model = replace(model, remat="full", scan_layers=True, max_len=longest)
    config = replace(config, model=model, context=length, accumulation=1, mesh=None, lora=None)
    template = jax.eval_shape(make_programs(config).fresh_state, np.uint32(0))
    total, layer = count(template.params), count(template.params["decoder"]) // model.num_layers
    # `remat` repeats the forward pass, a third of the operations
    flops = step_flops(config) * 4 / 3
    width, wide = jnp.dtype(model.dtype).itemsize, 4
    N, K, H, Hv = model.num_heads, model.kv_heads, model.key_dim, model.value_dim
    chosen = 1 if model.experts is None else model.experts.top_k
    hidden = chosen * model.expert_dim * (2 if model.glu else 1)
    table = model.vocab_size * model.embedding_width
    for P in (2**n for n in range(hardware.count.bit_length())):
        if (P > 1 and length % (2 * P)) or hardware.count % P:
            continue
        mesh, tokens = MeshConfig(fsdp=hardware.count // P, context=P), length // P
        of_keys, ring = tokens * K * (H + Hv), 0.0
        for number in range(model.num_layers):
            window = model.windows[number % len(model.windows)]
            others = P - 1 if window is None else min(P - 1, math.ceil((window - 1) / tokens))
            ring += others * (3 * (of_keys * width + 4 * tokens) + of_keys * wide)
        chunk = min(tokens, max(TOKENS_OF_CHUNK, ON_ACCELERATORS // model.vocab_size))
        working = (
            model.num_layers * tokens * model.d_model * width  # saved inputs of blocks
            + tokens * (2 * hidden + 4 * model.d_model + N * (H + Hv)) * width  # one block
            + (tokens * N * (H + Hv) + 4 * of_keys) * wide  # sums of the ring
            + chunk * model.vocab_size * wide  # logits
            + (layer + table) * (width + wide)  # gathered parameters and their gradients
        )
        state, shards = placement_on(hardware, mesh).state(template), hardware.count
        trained, optimizer = map(bytes_on_device, (state.params, (state.opt_state, state.average)))
        gradients = trained if config.param_dtype == "float32" else 2 * trained  # in float32
        yield LengthPlan(
            hardware,
            mesh,
            length,
            StepMemory(trained, optimizer, 0, gradients + working),
            ring,
            (shards - 1) / shards * total * (2 * width + wide),
            flops * mesh.fsdp / shards,
        )
