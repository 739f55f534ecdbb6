"""Count the multiplications and additions that a transformer's products take, from its config."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, TypeAlias, cast

import jax

from transformer_jax.config import LoraConfig, ModelConfig, TrainConfig
from transformer_jax.config.model import as_transformer
from transformer_jax.models.factory import init_params
from transformer_jax.models.lora import matrices, select
from transformer_jax.models.stack import unstack_layers
from transformer_jax.pytree import Params


class _Product(NamedTuple):
    """A product of the forward pass."""

    at: str
    """The path of its kernel; `.../scores` and `.../values` of an attention; `output`."""
    flops: float
    tokens: float
    """How many tokens meet its kernel, all blocks that share it counted."""


def forward_flops(config: ModelConfig, length: int, source_length: int = 0) -> float:
    """Return the operations of reading one sequence, all of whose tokens get logits.

    2 x the elements of each matrix x the tokens that it multiplies, and of each attention
    2 N (H + Hv) for each pair of a query and a key that its mask lets through (Kaplan et al. 2020,
    2.1; causal pairs are counted once, not the square). Of experts those count that a token is
    given to. `length` is that of the target of an encoder-decoder, whose source has
    `source_length`. Norms, activations and look-ups are left out; a classifier has logits of its
    classes, and none of tokens.
    """
    return sum(product.flops for product in _products(config, length, source_length))


def training_flops(
    config: ModelConfig,
    length: int,
    source_length: int = 0,
    *,
    frozen: tuple[str, ...] = (),
    lora: LoraConfig | None = None,
    whole: tuple[str, ...] = (),
) -> float:
    """Return the operations of learning from one sequence.

    The backward pass takes a product for the gradient of each factor that depends on what is
    trained: two, where all parameters are. What `remat` computes again is not counted, as is usual
    where utilisation is measured.

    Args:
        config: of the model.
        length: tokens of a sequence.
        source_length: of an encoder-decoder's source.
        frozen: beginnings of the names of parameters that are not trained.
        lora: adapters, which then are what is trained.
        whole: beginnings of the names of what is trained beside them, besides `lora.trained`.
    """
    names, given = [*_shapes(config)], matrices(_fresh(config))
    adapted = set() if lora is None else {f"{path}/kernel" for path in select(given, lora)}

    def begins(name: str, those: tuple[str, ...]) -> bool:
        heads = tuple(f"{head.strip('/')}/" for head in those)
        scanned = re.sub(r"block_\d+/", "blocks/", name) if config.scan_layers else name
        return f"{name}/".startswith(heads) or f"{scanned}/".startswith(heads)

    if lora is None:
        trained = {name for name in names if not begins(name, frozen)}
    else:
        trained = {name for name in names if begins(name, (*lora.trained, *whole))} | adapted
    both = config.kind == "encoder-decoder"
    of_source, of_target = list[_Place](), list[_Place]()
    for name in trained:
        place, in_encoder = _place(name, config), name.startswith("encoder/")
        of_source += [place] if in_encoder or place < _FIRST else []
        of_target += [] if both and in_encoder else [place]
    if both and of_source:  # which the target meets in its first attention to the source
        of_target.append((0, "cross_attention", 1))

    def depends(at: str) -> bool:
        """Whether what a kernel multiplies depends on a trained parameter."""
        if both and at.endswith(("cross_attention/key/kernel", "cross_attention/value/kernel")):
            return bool(of_source)
        block, branch, step = _place(at, config)
        before = of_source if both and at.startswith("encoder/") else of_target
        if config.is_parallel and 0 <= block < _LAST:  # its branches read the same
            return any(b < block or (b == block and own in ("", branch) and n < step)
                       for b, own, n in before)  # fmt: skip
        return min(before, default=(_LAST, "", 0)) < (block, branch, step)

    total = 0.0
    for at, flops, tokens in _products(config, length, source_length):
        head = at.rpartition("/")[0]
        again = 0.0  # the share of a block's passes that read what an earlier one of it wrote
        if config.share_layers and "block_0/" in at and any("block_0/" in own for own in trained):
            again = 1 - 1 / config.num_layers
        if at.endswith(("/scores", "/values")):
            query, key, value = (
                1.0 if depends(f"{head}/{name}/kernel")
                or any(own.startswith(f"{head}/{name}") for own in trained) else again
                for name in ("query", "key", "value")
            )  # fmt: skip
            factors = query + key if at.endswith("/scores") else max(query, key) + value
            total += flops * (1 + factors)
            continue
        table = "embed/tokens" if config.tie_embeddings else "embed/output"
        own = table in trained if at == "output" else at in trained - adapted
        read = 1.0 if depends(at) else again
        total += flops * (1 + read + own)
        if at in adapted:
            assert lora is not None
            inputs, outputs = given[head][-2:]
            total += 2 * lora.rank * tokens * (inputs * (2 + read) + outputs * 3)
    return total


@lru_cache(maxsize=1)  # of a run, which asks for each line that it logs
def step_flops(config: TrainConfig) -> float:
    """Return the operations of learning from a row of `sequence_len` tokens, by what is trained."""
    model, length = as_transformer(config.model), config.sequence_len
    return training_flops(
        model, length, length,
        frozen=config.frozen or (), lora=config.lora, whole=config.trained_whole,
    )  # fmt: skip


_Place: TypeAlias = tuple[int, str, int]
"""A block, a branch and a step there, in the order in which a stack computes; branches as it
happens in that of the alphabet."""

_FIRST, _LAST = (0, "", 0), 2**31


def _place(name: str, config: ModelConfig) -> _Place:
    """Return where a parameter or a product stands in its stack."""
    parts = name.split("/")
    at = next((n for n, part in enumerate(parts) if part.startswith("block_")), None)
    if at is None:
        is_kernel = parts[-1] == "kernel"
        if parts[0] in ("embed", "inputs") and not parts[1].startswith(("output", "bias")):
            return (-1, "", is_kernel)
        order = "encoder", "decoder", "pooler", "head_dense", "head_norm", "classifier"
        late = order.index(parts[0]) if parts[0] in order else len(order)
        return (_LAST + late, "", is_kernel)
    block, rest = int(parts[at].removeprefix("block_")), parts[at + 1 :]
    branch = next((b for b in ("cross_attention", "attention") if b in rest[0]), "feed_forward")
    if "norm" in rest[0]:
        after = config.norm_order == "post" or rest[0].startswith("out")
        shared = config.norm_order == "parallel_shared"
        return (block, "" if shared else branch, 9 if after else 0)
    first = {"query", "key", "value", "up", "gate", "router", "shared_gate"}
    return (block, branch, 1 if first & {*rest} else 2)


def _fresh(config: ModelConfig) -> Params:
    """Return the shapes of the parameters of the looped stack."""
    shapes = jax.eval_shape(lambda: unstack_layers(init_params(config, jax.random.key(0))))
    return cast(Params, shapes)


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    paths = jax.tree_util.tree_flatten_with_path(_fresh(config))[0]
    return {jax.tree_util.keystr(at, simple=True, separator="/"): leaf.shape for at, leaf in paths}


def _products(config: ModelConfig, length: int, source_length: int) -> Iterator[_Product]:
    """Yield the products of reading one sequence."""
    for name, shape in _shapes(config).items():
        names = name.split("/")
        if names[-1] == "kernel":
            times = config.num_layers if config.share_layers and "block_0" in names else 1
            tokens = _tokens(names, config, length, source_length) * _share(names, config) * times
            size = math.prod(shape)
            yield _Product(name, 2 * size * tokens, tokens)
    if config.num_classes is None and config.has_logits:
        logits = 2.0 * config.vocab_size * config.embedding_width * length
        yield _Product("output", logits, length)

    def attention(at: str, pairs: float) -> Iterator[_Product]:
        for part, width in (("scores", config.key_dim), ("values", config.value_dim)):
            yield _Product(f"{at}/{part}", 2.0 * config.num_heads * width * pairs, 0)

    def block(number: int) -> str:
        return f"block_{0 if config.share_layers else number}"

    if config.kind != "decoder":
        source = length if config.kind == "encoder" else source_length
        for number, window in enumerate(_windows(config, config.num_layers)):
            pairs = _pairs(window, source, False, config.sink_tokens)
            yield from attention(f"encoder/{block(number)}/attention", pairs)
    if config.kind != "encoder":
        both = config.kind == "encoder-decoder"
        depth = config.decoder_layers if both else config.num_layers
        for number, window in enumerate(_windows(config, depth)):
            pairs = _pairs(window, length, True, config.sink_tokens)
            yield from attention(f"decoder/{block(number)}/attention", pairs)
            if both:
                here = f"decoder/{block(number)}/cross_attention"
                yield from attention(here, length * source_length)


def _windows(config: ModelConfig, depth: int) -> list[int | None]:
    return [config.windows[i % len(config.windows)] for i in range(depth)]


def _pairs(window: int | None, length: int, causal: bool, sinks: int) -> float:
    """Count the pairs of a query and a key that a window and the sink tokens let through."""
    reach = length if window is None else min(window, length)
    before = reach * (reach + 1) / 2 + (length - reach) * reach  # the query itself included
    past = length - reach  # keys that the last query has before its window, one less for each
    some = min(sinks, past)
    before += some * (some + 1) / 2 + (past - some) * some
    if causal:
        return before
    # as many after as before, and the query itself is in both
    after = reach * (reach + 1) / 2 + (length - reach) * reach
    return before + after - length


def active_params(config: ModelConfig) -> int:
    """Count the parameters that a token meets: of experts, those that it is given to."""
    shapes = _shapes(config).items()
    return round(sum(math.prod(shape) * _share(name.split("/"), config) for name, shape in shapes))


def _share(names: list[str], config: ModelConfig) -> float:
    """Return which part of a parameter a token meets."""
    of_experts = names[-3:-2] == ["feed_forward"] and names[-2] in ("up", "gate", "down")
    if config.experts is None or not of_experts:
        return 1.0
    return config.experts.top_k / config.experts.count


def _tokens(names: list[str], config: ModelConfig, length: int, source_length: int) -> int:
    """Return how many tokens a kernel multiplies."""
    if config.kind != "encoder-decoder":
        pools = "head_dense" if config.pooling == "transform" else "pooler"
        once = (pools, "classifier") if config.classes_of == "text" else (pools,)
        return 1 if names[0] in once and config.pooler_reads != "each" else length
    of_memory = "cross_attention" in names and names[-2] in ("key", "value")
    return source_length if names[0] in ("encoder", "inputs") or of_memory else length
