"""Custom blocks, which edit or replace the blocks of a model with your own code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformer_jax.config.custom import check_custom
from transformer_jax.config.fields import fail

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from transformer_jax.config.model import ModelConfig


class CustomBlock:
    """Base class of custom blocks, which are frozen dataclasses that override `edit` or `run`.

    `init` returns the initial parameters, which are stored as "own" in each block of the model.
    `edit` changes values inside the library's block. `run` replaces the whole block.
    """

    custom_kind_of: type  # this class, set below

    def init(self, config: ModelConfig, key: Any) -> Mapping[str, Any]:
        """Return the initial parameters of one block as a (nested) dict of float32 arrays.

        `plan` and Muon treat a matrix named "kernel" as a kernel. Weight decay applies to matrices
        only.

        Args:
            config: the config of the model.
            key: the random key for this block.
        """
        return {}

    def edit(self, params: Any) -> Mapping[str, Callable[[Any], Any]]:
        """Return functions keyed by the names of places in a block, such as "attention/heads".

        Each function takes the value at its place, [B, T, ...], and returns a new value. It must be
        pure and must not mix tokens.

        Args:
            params: the parameters of this block, as `init` drew them.
        """
        return {}

    def run(
        self,
        params: Any,
        x: Any,  # [B, T, D]
        call: Any,  # a class from `models.block`, which imports this module
    ) -> Any:  # [B, T, D]
        """Return the residual stream after the block.

        Args:
            params: the parameters of this block, as `init` drew them.
            x: [B, T, D], the residual stream before the block.
            call: an object with `attend(q, k, v)`, `dropout(y)` and `layer`, the index of the
                block. Call `attend` once, with arrays of shape [B, T, N, H], [B, T, K, H] and
                [B, T, K, Hv]. It uses the cache and the positions, mask and implementation of the
                config, and returns the output of each head, [B, T, N, Hv].
        """
        raise NotImplementedError

    @property
    def is_whole(self) -> bool:
        """Whether this block replaces the library's block."""
        return type(self).run is not CustomBlock.run

    def check_model(self, model: ModelConfig) -> None:
        """Raise ConfigError if the block cannot be part of a config or does not fit the model.

        Args:
            model: the config that contains this block.
        """
        check_custom("block", self)
        if self.is_whole and type(self).edit is not CustomBlock.edit:
            fail("block", self, "must override edit or run, not both")
        if model.kind == "encoder-decoder":
            fail("block", self, "needs kind 'decoder' or 'encoder'")
        for name in ("experts", "qk_norm", "attention_gate") if self.is_whole else ():
            if getattr(model, name):
                fail(name, getattr(model, name), "is not used by a custom block with `run`")


CustomBlock.custom_kind_of = CustomBlock
