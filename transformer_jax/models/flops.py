"""Number of floating-point operations in the matrix products of a transformer, given its config."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, TypeAlias, cast

import jax

from transformer_jax.config import LatentAttention, LoraConfig, ModelConfig, TrainConfig
from transformer_jax.config.mixers import STATEFUL
from transformer_jax.config.model import as_transformer
from transformer_jax.models.factory import init_params
from transformer_jax.models.lora import matrices, select
from transformer_jax.models.stack import unstack_layers
from transformer_jax.pytree import Params


class _Product(NamedTuple):
    """Matrix product in the forward pass."""

    at: str
    """Path of the kernel, `output`, `.../scores` or `.../values` for attention, or `.../write` or
    `.../read` for a state."""
    flops: float
    tokens: float
    """Number of tokens that are multiplied by the kernel, summed over all blocks that share it."""


def forward_flops(config: ModelConfig, length: int, source_length: int = 0) -> float:
    """Count the operations of one forward pass over a sequence, with logits for all tokens.

    A matrix product counts as 2 x the number of matrix elements x the number of tokens. Attention
    counts as 2 N (H + Hv) for each pair of a query and a visible key (Kaplan et al. 2020, section
    2.1, count the full square). A token counts as 6 H Hv for each state [H, Hv]: it multiplies the
    state by its key, adds a product to it and multiplies it by its query. Only the chosen experts
    are counted. Norms, activations and lookups are not counted. A classifier has class logits
    instead of token logits. For an encoder-decoder, `length` is the length of the target.
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
    """Count the operations of one training step (forward and backward) on a sequence.

    For each product in the forward pass, the backward pass computes one product for each factor
    that depends on a trained parameter, so it computes two products if all parameters are trained.
    Recomputation by `remat` is not counted, as is usual for utilization.

    Args:
        config: config of the model.
        length: number of tokens per sequence.
        source_length: length of the source of an encoder-decoder.
        frozen: name prefixes of parameters that are not trained.
        lora: config of the adapters. If it is passed, only the adapters, `lora.trained` and `whole`
            are trained.
        whole: name prefixes of parameters that are trained in addition to the adapters.
    """
    names, found = [*_shapes(config)], matrices(_fresh(config))
    adapted = set() if lora is None else {f"{path}/kernel" for path in select(found, lora)}

    def has_prefix(name: str, prefixes: tuple[str, ...]) -> bool:
        prefixes = tuple(f"{prefix.strip('/')}/" for prefix in prefixes)
        scanned = re.sub(r"block_\d+/", "blocks/", name) if config.scan_layers else name
        return f"{name}/".startswith(prefixes) or f"{scanned}/".startswith(prefixes)

    if lora is None:
        trained = {name for name in names if not has_prefix(name, frozen)}
    else:
        trained = {name for name in names if has_prefix(name, (*lora.trained, *whole))} | adapted
    both = config.kind == "encoder-decoder"
    of_source, of_target = list[_Place](), list[_Place]()
    for name in trained:
        place, in_encoder = _place(name, config), name.startswith("encoder/")
        of_source += [place] if in_encoder or place < _FIRST else []
        of_target += [] if both and in_encoder else [place]
    if both and of_source:  # the first cross-attention passes the source to the target
        of_target.append((0, "cross_attention", 1))

    def depends(at: str) -> bool:
        """Whether the input of a kernel depends on a trained parameter."""
        if both and at.endswith(("cross_attention/key/kernel", "cross_attention/value/kernel")):
            return bool(of_source)
        block, branch, step = _place(at, config)
        before = of_source if both and at.startswith("encoder/") else of_target
        if config.is_parallel and 0 <= block < _LAST:  # parallel branches read the same input
            return any(b < block or (b == block and other in ("", branch) and n < step)
                       for b, other, n in before)  # fmt: skip
        return min(before, default=(_LAST, "", 0)) < (block, branch, step)

    total = 0.0
    for at, flops, tokens in _products(config, length, source_length):
        module = at.rpartition("/")[0]
        shared = 0.0  # with shared layers, the share of passes that read the output of another pass
        if config.share_layers and "block_0/" in at and any("block_0/" in x for x in trained):
            shared = 1 - 1 / config.num_layers
        if at.endswith(("/scores", "/values")):
            query, key, value = (
                1.0 if depends(f"{module}/{name}/kernel")
                or any(x.startswith(f"{module}/{name}") for x in trained) else shared
                for name in ("query", "key", "value")
            )  # fmt: skip
            factors = query + key if at.endswith("/scores") else max(query, key) + value
            total += flops * (1 + factors)
            continue
        if at.endswith(("/write", "/read")):

            def varies(*names: str, module: str = module) -> float:
                inside = any(x.startswith(tuple(f"{module}/{n}" for n in names)) for x in trained)
                return 1.0 if inside or depends(f"{module}/query/kernel") else 0.0

            state = varies("key", "value", "beta", "decay")
            factors = 2 * state if at.endswith("/write") else state + varies("query")
            total += flops * (1 + factors)
            continue
        table = "embed/tokens" if config.tie_embeddings else "embed/output"
        kernel = table in trained if at == "output" else at in trained - adapted
        read = 1.0 if depends(at) else shared
        total += flops * (1 + read + kernel)
        if at in adapted:
            assert lora is not None
            # both factors need a product in the forward pass, for their gradient and for that of
            # their input, except that the first factor's input may not depend on a trained
            # parameter
            inputs, outputs = found[module][-2:]
            total += 2 * lora.rank * tokens * (inputs * (2 + read) + outputs * 3)
    return total


@lru_cache(maxsize=1)  # a training run calls this for every log line
def step_flops(config: TrainConfig) -> float:
    """Count the operations of a training step for one row of `sequence_len` tokens."""
    model, length = as_transformer(config.model), config.sequence_len
    return training_flops(
        model, length, length,
        frozen=config.frozen or (), lora=config.lora, whole=config.trained_whole,
    )  # fmt: skip


_Place: TypeAlias = tuple[int, str, int]
"""Block, branch and step. Tuples sort in the order of computation, because the branch names happen
to be in alphabetical order."""

_FIRST, _LAST = (0, "", 0), 2**31


def _place(name: str, config: ModelConfig) -> _Place:
    """Return the place of a parameter or product in the order of computation of its stack."""
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
    if any(mixer in rest[0] for mixer in STATEFUL):
        branch = "attention"  # in the order of computation
    if "norm" in rest[0]:
        after = config.norm_order == "post" or rest[0].startswith("out")
        shared = config.norm_order == "parallel_shared"
        return (block, "" if shared else branch, 9 if after else 0)
    first = {"query", "key", "value", "up", "gate", "router", "shared_gate", "input_gate"}
    first |= {"output_gate"}
    if "gated_delta" in rest and (sizes := config.gated_delta) is not None:
        ranks = {"decay": sizes.decay_rank, "gate": sizes.gate_rank}
        second = {name for name, rank in ranks.items() if rank is not None}
        return (block, branch, 3 if "out" in rest else 2 if second & {*rest} else 1)
    if "latent_attention" in rest:
        latent, second = config.latent_attention, {"key", "value"}
        second |= {"query"} if latent is not None and latent.query_rank else set()
        return (block, branch, 3 if "out" in rest else 2 if second & {*rest} else 1)
    return (block, branch, 1 if first & {*rest} else 2)


def _fresh(config: ModelConfig) -> Params:
    """Return the shapes of the parameters in a looped stack."""
    shapes = jax.eval_shape(lambda: unstack_layers(init_params(config, jax.random.key(0))))
    return cast(Params, shapes)


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    paths = jax.tree_util.tree_flatten_with_path(_fresh(config))[0]
    return {jax.tree_util.keystr(at, simple=True, separator="/"): leaf.shape for at, leaf in paths}


def _products(config: ModelConfig, length: int, source_length: int) -> Iterator[_Product]:
    """Yield the matrix products in a forward pass over one sequence."""
    for name, shape in _shapes(config).items():
        names = name.split("/")
        if names[-1] == "kernel":
            times = config.num_layers if config.share_layers and "block_0" in names else 1
            tokens = _tokens(names, config, length, source_length) * _share(names, config) * times
            yield _Product(name, 2 * math.prod(shape) * tokens, tokens)
    if config.num_classes is None and config.has_logits:
        logits = 2.0 * config.vocab_size * config.embedding_width * length
        yield _Product("output", logits, length)

    def attention(
        at: str, pairs: float, one: ModelConfig | LatentAttention = config
    ) -> Iterator[_Product]:
        for part, width in (("scores", one.key_dim), ("values", one.value_dim)):
            yield _Product(f"{at}/{part}", 2.0 * config.num_heads * width * pairs, 0)

    def block(number: int) -> str:
        return f"block_{0 if config.share_layers else number}"

    if config.kind != "decoder":
        source = length if config.kind == "encoder" else source_length
        for number in range(config.num_layers):
            window = config.windows[number % len(config.windows)]
            pairs = _pairs(window, source, False, config.sink_tokens)
            yield from attention(f"encoder/{block(number)}/attention", pairs)
    if config.kind != "encoder":
        both = config.kind == "encoder-decoder"
        depth = config.decoder_layers if both else config.num_layers
        for number in range(depth):
            if config.mixer(number) == "gated_delta":
                assert config.gated_delta is not None
                sizes, at = config.gated_delta, f"decoder/block_{number}/gated_delta"
                once = 2.0 * sizes.num_value_heads * sizes.key_dim * sizes.value_dim * length
                yield _Product(f"{at}/write", 2 * once, 0)
                yield _Product(f"{at}/read", once, 0)
                continue
            if config.mixer(number) == "short_conv":
                continue
            window = config.windows[number % len(config.windows)]
            pairs = _pairs(window, length, True, config.sink_tokens)
            if (latent := config.latent_attention) and config.mixer(number) == "latent_attention":
                yield from attention(f"decoder/block_{number}/latent_attention", pairs, latent)
                continue
            yield from attention(f"decoder/{block(number)}/attention", pairs)
            if both:
                at = f"decoder/{block(number)}/cross_attention"
                yield from attention(at, length * source_length)


def _pairs(window: int | None, length: int, causal: bool, sinks: int) -> float:
    """Count the visible query-key pairs, given a window and a number of sink tokens."""
    reach = length if window is None else min(window, length)
    before = reach * (reach + 1) / 2 + (length - reach) * reach  # includes the query itself
    past = length - reach  # keys before the last query's window; each earlier query has one fewer
    visible = min(sinks, past)
    before += visible * (visible + 1) / 2 + (past - visible) * visible
    if causal:
        return before
    # as many keys follow the query; both terms count the query itself
    after = reach * (reach + 1) / 2 + (length - reach) * reach
    return before + after - length


def active_params(config: ModelConfig) -> int:
    """Count the parameters used per token, excluding the experts that are not chosen."""
    shapes = _shapes(config).items()
    return round(sum(math.prod(shape) * _share(name.split("/"), config) for name, shape in shapes))


def _share(names: list[str], config: ModelConfig) -> float:
    """Return the fraction of a parameter's elements that is used per token."""
    of_experts = names[-3:-2] == ["feed_forward"] and names[-2] in ("up", "gate", "down")
    if config.experts is None or not of_experts:
        return 1.0
    if not config.has_experts(int(names[-4].removeprefix("block_"))):
        return 1.0
    return config.experts.top_k / config.experts.count


def _tokens(names: list[str], config: ModelConfig, length: int, source_length: int) -> int:
    """Return the number of tokens that are multiplied by a kernel."""
    if config.kind != "encoder-decoder":
        pools = "head_dense" if config.pooling == "transform" else "pooler"
        once = (pools, "classifier") if config.classes_of == "text" else (pools,)
        return 1 if names[0] in once and config.pooler_reads != "each" else length
    # in cross-attention, only the queries come from the target
    of_memory = "cross_attention" in names and names[-2] in ("key", "value")
    return source_length if names[0] in ("encoder", "inputs") or of_memory else length
