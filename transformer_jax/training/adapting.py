"""Train adapters of a model that stays as it is: its own state, and its part of a run.

The state of such a run holds adapters, and parameters that are trained whole. The others, the
base, are an argument of each step, and are in no checkpoint: they are loaded from where the run
began, and known by their SHA-256.
"""

from __future__ import annotations

import jax
import optax
from flax.traverse_util import flatten_dict

from transformer_jax.config import ConfigError, LoraConfig, TrainConfig
from transformer_jax.models.factory import init_params
from transformer_jax.models.lora import frozen_part, rejoined, trained_part
from transformer_jax.pytree import sha256_of
from transformer_jax.training.batch import Batch, Loss, Params
from transformer_jax.training.initial import StartModel, start_params
from transformer_jax.training.placement import Placement
from transformer_jax.training.step import TrainState, split_seed, start_state
from transformer_jax.untrusted_files import JsonObject

_ADAPTERS = 1
"""What `fold_in` makes the key of adapters of: the parameters are drawn from the key itself."""


def adapted_loss(loss: Loss, lora: LoraConfig, *, relative: bool = False) -> Loss:
    """Return `loss(params, batch, key)` as `loss(trained, batch, key, base)`.

    A loss that is `relative` to where the run began gets the base besides, which is that.
    """

    def adapted(
        trained: Params, batch: Batch, key: jax.Array | None, base: Params
    ) -> tuple[jax.Array, jax.Array]:
        reference = (base,) if relative else ()
        return loss(rejoined(base, trained, lora), batch, key, *reference)

    return adapted


def given_params(config: TrainConfig, start: StartModel) -> Params:
    """Load the parameters of the model to start from, of the stack that the run has."""
    return start.params(config.model.scan_layers)


def fresh_trained(config: TrainConfig, params: Params, key: jax.Array) -> Params:
    """Return what a run with adapters trains, at its start."""
    assert config.lora is not None
    own = jax.random.fold_in(key, _ADAPTERS)
    return trained_part(params, config.lora, own, config.trained_whole)


def fresh_adapters(
    config: TrainConfig, optimizer: optax.GradientTransformation, seed: jax.typing.ArrayLike
) -> TrainState:
    """Return the state of step 0 of a run that trains adapters of a fresh model."""
    init_key, key = split_seed(seed)
    params = fresh_trained(config, init_params(config.model, init_key), init_key)
    return start_state(params, optimizer, key, average=config.ema_decay is not None)


class FrozenBase:
    """Hold the parameters of a run that stay as they are."""

    params: Params
    """Their shapes; once they are loaded, they themselves on the devices."""
    sha256: str
    """Of the parameters that were loaded, before any of them was quantised."""

    def __init__(self, config: TrainConfig, placement: Placement) -> None:
        self.config, self._placement = config, placement
        # the base is not loaded before the step is known to fit the memory
        shapes = jax.eval_shape(lambda: self.part(init_params(config.model, jax.random.key(0))))
        self.params = placement.state(shapes)

    @property
    def lora(self) -> LoraConfig:
        """Return how the adapters are made."""
        assert self.config.lora is not None
        return self.config.lora

    def part(self, params: Params) -> Params:
        """Return of all parameters those that stay as they are."""
        return frozen_part(params, self.lora, self.config.trained_whole)

    def trained(self, given: Params, params: Params, key: jax.Array) -> Params:
        """Return what the run trains, at its start.

        ConfigError where a parameter is not the given one, and is not trained whole.
        """
        found = fresh_trained(self.config, params, key)
        whole = found["whole"]
        old = flatten_dict(given, sep="/")
        for name, leaf in flatten_dict(params, sep="/").items():
            if name not in whole and (name not in old or old[name].shape != leaf.shape):
                rule = f"it is new, at least in part: add it, trained={name}"
                raise ConfigError(f"lora.trained lacks {name!r}: {rule}")
        return found

    def load(
        self, start: StartModel, key: jax.Array, metadata: JsonObject | None = None
    ) -> tuple[Params, list[str]]:
        """Load them; return what the run trains, at its start, and lines about what is new.

        CheckpointError where `metadata` of a checkpoint has another model, ConfigError where a
        parameter is new and is not trained.
        """
        config = self.config
        given = given_params(config, start)
        if metadata is None:
            self.sha256 = sha256_of(given)
        else:
            from transformer_jax.loading import check_base

            assert config.init_from is not None
            check_base(config.init_from, given, metadata)
            self.sha256 = metadata["base_sha256"]
        params, changes = start_params(config, start, given, key)
        trained, kept = self.trained(given, params, key), self.part(params)
        shardings = self._placement.shardings(self.params)
        self.params = kept if shardings is None else jax.device_put(kept, shardings)
        return trained, changes

    def rejoined(self, trained: Params) -> Params:
        """Return the parameters of the model, with the adapters beside their kernels."""
        return rejoined(self.params, trained, self.lora)
