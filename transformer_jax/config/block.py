"""A block of your own: what it is made of is yours, the rest is as in every other model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformer_jax.config.fields import fail
from transformer_jax.config.own import check_own

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from transformer_jax.config.model import ModelConfig


class OwnBlock:
    """A block of your own: make a frozen dataclass of it that overrides `edit` or `run`.

    `init` draws its parameters, which each block of the model has under the name "own". `edit`
    changes values inside the library's block; `run` takes the place of the block.
    """

    own_kind_of: type  # itself, once it is there

    def init(self, config: ModelConfig, key: Any) -> Mapping[str, Any]:
        """Return the parameters of one block, a dict of float32 arrays that may be nested.

        A matrix that is called "kernel" counts as one for `plan` and Muon; weight decay shrinks
        matrices.

        Args:
            config: of the model.
            key: a random key of this block's own.
        """
        return {}

    def edit(self, params: Any) -> Mapping[str, Callable[[Any], Any]]:
        """Return functions by the names of places of a block, as "attention/heads".

        Each is called with the value of that place, which starts with [B, T], and returns another
        one; it must be pure, and compute a token's value from that token alone.

        Args:
            params: of this block, as `init` drew them.
        """
        return {}

    def run(
        self,
        params: Any,
        x: Any,  # [B, T, D]
        call: Any,  # of `models.block`, a floor above
    ) -> Any:  # [B, T, D]
        """Return the stream after the block.

        Args:
            params: of this block, as `init` drew them.
            x: [B, T, D], the stream before the block.
            call: has `attend(q, k, v)`, to be called once, for [B, T, N, H], [B, T, K, H] and
                [B, T, K, Hv]: it returns what each head gives, [B, T, N, Hv], through the cache,
                by the config's positions, mask and implementation; `dropout(y)`; and `layer`, the
                number of the block.
        """
        raise NotImplementedError

    @property
    def is_whole(self) -> bool:
        """Say whether it takes the place of the library's block."""
        return type(self).run is not OwnBlock.run

    def check_model(self, model: ModelConfig) -> None:
        """Raise ConfigError where no config can hold this value, or the model has no place for it.

        Args:
            model: the config that it is a part of.
        """
        check_own("block", self)
        if self.is_whole and type(self).edit is not OwnBlock.edit:
            fail("block", self, "must override edit or run, not both")
        if model.kind == "encoder-decoder":
            fail("block", self, "needs kind 'decoder' or 'encoder'")
        if self.is_whole and (model.experts is not None or model.qk_norm):
            name = "qk_norm" if model.experts is None else "experts"
            fail(name, getattr(model, name), "is not read by the `run` of a block of your own")


OwnBlock.own_kind_of = OwnBlock
