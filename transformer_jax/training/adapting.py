"""Adapter training (LoRA): the trainable state and the frozen base model.

The state contains the adapters and the parameters that are trained in full. All other parameters
form the base. The base is passed to each step, but it is not saved in checkpoints. A resumed run
loads it from `init_from` and verifies its SHA-256.
"""

from __future__ import annotations

import jax
import optax
from flax.traverse_util import flatten_dict

from transformer_jax.config import ConfigError, LoraConfig, TrainConfig
from transformer_jax.models.factory import init_params
from transformer_jax.models.lora import join_parts, split_frozen, split_trained
from transformer_jax.pytree import sha256_of
from transformer_jax.training.batch import Batch, Loss, Params
from transformer_jax.training.initial import StartModel, start_params
from transformer_jax.training.placement import Placement
from transformer_jax.training.step import TrainState, split_seed, start_state
from transformer_jax.untrusted_files import JsonObject

_ADAPTERS = 1
"""`fold_in` constant for the key of the adapters. The model's parameters use the original key."""


def adapted_loss(loss: Loss, lora: LoraConfig, *, relative: bool = False) -> Loss:
    """Wrap `loss(params, batch, key)` as `loss(trained, batch, key, base)`.

    If `relative` is true, the base is also passed to `loss` as the reference model.
    """

    def adapted(
        trained: Params, batch: Batch, key: jax.Array | None, base: Params
    ) -> tuple[jax.Array, jax.Array]:
        reference = (base,) if relative else ()
        return loss(join_parts(base, trained, lora), batch, key, *reference)

    return adapted


def fresh_trained(config: TrainConfig, params: Params, key: jax.Array) -> Params:
    """Return the trainable parameters at the start of a run with adapters."""
    assert config.lora is not None
    adapter_key = jax.random.fold_in(key, _ADAPTERS)
    return split_trained(params, config.lora, adapter_key, config.trained_whole)


def fresh_adapters(
    config: TrainConfig, optimizer: optax.GradientTransformation, seed: jax.typing.ArrayLike
) -> TrainState:
    """Return the initial state of a newly initialized model with adapters."""
    init_key, key = split_seed(seed)
    params = fresh_trained(config, init_params(config.model, init_key), init_key)
    return start_state(params, optimizer, key, average=config.ema_decay is not None)


class FrozenBase:
    """Frozen base parameters of a run."""

    params: Params
    """Shapes before `load` is called, and arrays on the devices afterward."""
    sha256: str
    """Hash of the loaded parameters before quantization."""

    def __init__(self, config: TrainConfig, placement: Placement) -> None:
        self.config, self._placement = config, placement
        # the base is loaded only after the memory check
        shapes = jax.eval_shape(lambda: self.part(init_params(config.model, jax.random.key(0))))
        self.params = placement.state(shapes)

    @property
    def lora(self) -> LoraConfig:
        """Return the adapter config."""
        assert self.config.lora is not None
        return self.config.lora

    def part(self, params: Params) -> Params:
        """Return the parameters that are not trained in this run."""
        return split_frozen(params, self.lora, self.config.trained_whole)

    def trained(self, loaded: Params, params: Params, key: jax.Array) -> Params:
        """Return the trainable parameters at the start of the run.

        Raises ConfigError if a parameter that is new or has a new shape is not trained in full.
        """
        found = fresh_trained(self.config, params, key)
        whole = found["whole"]
        before = flatten_dict(loaded, sep="/")
        for name, leaf in flatten_dict(params, sep="/").items():
            if name not in whole and (name not in before or before[name].shape != leaf.shape):
                rule = f"it is new or has a new shape; add trained={name}"
                raise ConfigError(f"lora.trained lacks {name!r}: {rule}")
        return found

    def load(
        self, start: StartModel, key: jax.Array, metadata: JsonObject | None = None
    ) -> tuple[Params, list[str]]:
        """Load the frozen parameters. Return the trainable ones and a message for each new part.

        `metadata` is the metadata of a checkpoint. Raises CheckpointError if it names a different
        base model, and ConfigError if a new parameter is not trained.
        """
        config = self.config
        loaded = start.params(config.model.scan_layers)
        if metadata is None:
            self.sha256 = sha256_of(loaded)
        else:
            from transformer_jax.loading import check_base

            assert config.init_from is not None
            check_base(config.init_from, loaded, metadata)
            self.sha256 = metadata["base_sha256"]
        params, changes = start_params(config, start, loaded, key)
        # The trainable part is checked first, because an error is cheaper before the base is
        # quantized.
        trained, frozen = self.trained(loaded, params, key), self.part(params)
        shardings = self._placement.shardings(self.params)
        self.params = frozen if shardings is None else jax.device_put(frozen, shardings)
        return trained, changes

    def join_parts(self, trained: Params) -> Params:
        """Return the model's parameters, with each adapter next to its kernel."""
        return join_parts(self.params, trained, self.lora)
