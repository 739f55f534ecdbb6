"""Documentation of config fields, and suggestions for argument names from other libraries."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, cast, dataclass_transform, overload

from transformer_jax.config.fields import nearest
from transformer_jax.values import value_class

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

_OTHER_NAMES = {
    # decoding
    "capacity": "max_len max_length max_seq_len max_cache_len",
    "num_tokens": "max_new_tokens max_tokens max_length",
    "generate(step, ..., num_tokens=...)": "max_new_tokens max_tokens max_length",
    "sampler=Sample(Temperature(...))": "temperature temp",
    "sampler=Sample(TopK(...))": "top_k",
    "sampler=Sample(TopP(...))": "top_p",
    "sampler=Sample(MinP(...))": "min_p",
    "sampler=Sample(Typical(...))": "typical_p",
    "t": "temperature temp",
    "k": "top_k",
    "p": "top_p min_p typical_p penalty repetition_penalty",
    "Sample(Temperature(...))": "temperature temp",
    "Sample(TopK(...))": "top_k",
    "Sample(TopP(...))": "top_p",
    "sampler=Sample()": "do_sample",
    "sampler=Greedy()": "deterministic",
    "num_beams": "beam_size beam_width beams n_beams",
    "beam_search(..., num_beams=...)": "num_beams beam_size beam_width beams n_beams",
    "beam_search(..., length_penalty=LengthPenalty(...))": "length_penalty",
    "groups": "num_beam_groups",
    "diversity": "diversity_penalty",
    "num_results": "num_return_sequences",
    "copies": "num_return_sequences num_samples count times n",
    "fork(state, n), one row per sample": "num_return_sequences num_samples",
    "processors=[RepetitionPenalty(...)]": "repetition_penalty",
    "processors=[PresencePenalty(...)]": "presence_penalty",
    "processors=[FrequencyPenalty(...)]": "frequency_penalty freq_penalty",
    "processors=[NoRepeatNGram(...)]": "no_repeat_ngram_size",
    "processors=[MinLength(...)]": "min_new_tokens min_length",
    "processors=[BanSequences(...)]": "bad_words_ids",
    "processors=[Ban(...)]": "suppress_tokens",
    "processors=[Force(...)]": "forced_bos_token_id",
    "processors=[ForceLast(...)]": "forced_eos_token_id",
    "processors": "logits_processor logits_processors",
    "n": "ngram_size no_repeat_ngram_size min_length min_new_tokens",
    "stop": "eos_token_id eos_id stop_token stop_tokens stop_token_ids stopping_criteria "
    "stop_at_eos",
    "load(FOLDER).generate(..., stop=...)": "stop_strings",
    "stream(...)": "streamer",
    "num_draft": "num_assistant_tokens num_speculative_tokens gamma",
    "proposer=PromptLookup(...)": "prompt_lookup_num_tokens",
    "proposer=Draft(...)": "assistant_model draft_model",
    "speculate(..., proposer=Draft(...))": "assistant_model draft_model",
    "slots": "batch_size max_batch_size max_num_seqs",
    "prompt": "input_ids inputs tokens",
    "state": "cache kv_cache past_key_values",
    "lengths=attention_mask": "attention_mask",
    "lengths": "prompt_lengths seq_lens padding_side",
    "leave it out: `lengths` tells padding from tokens, also on the left": "pad_token_id pad_id",
    "leave it out: the tokenizer adds it to the prompt": "bos_token_id",
    "leave it out: decoding always uses a cache": "use_cache",
    "capture=('block_*/attention/weights',)": "output_attentions attention",
    "capture=('block_*/residual',)": "output_hidden_states",
    "capture=('logits',)": "output_scores output_logits",
    "early_exit": "early_stopping",
    "model.edited({...})": "edit",
    "generate(step, ..., capture=...)": "capture",
    # attention
    "q_positions": "q_indices query_positions",
    "k_positions": "k_indices key_positions",
    "scale": "sm_scale softmax_scale logits_scale scaling",
    "sinks": "s_aux attention_sinks",
    "block_table": "page_table page_indices",
    "softcap": "logits_soft_cap soft_cap attn_logits_soft_cap logits_softcap",
    "dropout_rate=0.0, which turns dropout off": "deterministic train training is_training",
    "dropout_rate": "dropout dropout_p",
    "dropout_rate and dropout_key, which determine it": "dropout_mask",
    "dropout_key": "dropout_rng rng rngs seed prng_key",
    "implementation": "backend impl attn_implementation",
    "return_lse": "return_residual return_residuals return_attn_probs",
    "query": "q",
    "query, which sets the dtype of the result": "dtype",
    "value": "v",
    "dot_product_attention_weights(query, key, ...)": "need_weights average_attn_weights "
    "return_attention_scores return_softmax",
    "leave it out: grouped queries are always supported": "enable_gqa",
    "leave it out: scores and softmax are always float32": "force_fp32_for_softmax",
    # calls of a model
    "positions=jnp.where(valid, jnp.cumsum(valid, axis=1) - 1, -1)": "attention_mask "
    "key_padding_mask padding_mask src_key_padding_mask",
    "key, a random key that turns dropout on; None turns it off": "deterministic train training "
    "is_training dropout_rng",
    "source": "input_ids encoder_input_ids src",
    "tokens": "input_ids inputs idx decoder_input_ids",
    "positions": "position_ids input_pos segment_pos position_embedding_type "
    "positional_embedding_type",
    "segments": "segment_ids document_ids",
    "types": "token_type_ids",
    "attention_weights(model, params, tokens)": "output_attentions attend attend_source",
    "model.edited(interpret.scale('block_*/attention/heads', mask))": "head_mask decoder_head_mask",
    "model.edited(interpret.scale('block_*/cross_attention/heads', mask))": "cross_head_mask "
    "cross_attn_head_mask",
    "model.edited(interpret.scale('encoder/block_*/attention/heads', mask))": "encoder_head_mask",
    "model.edited({'embedding': ...})": "inputs_embeds input_embeddings",
    "model.edited({'block_0/residual': ...})": "fwd_hooks hooks",
    "capture": "names_filter stop_at_layer return_cache_object",
    "at": "logits_to_keep num_logits_to_keep",
    "cache": "past_key_values past_kv_cache kv_cache layer_past decode use_cache",
    "cross_entropy(logits, labels)": "labels targets",
    # attention, and a model
    "mask=Padding(~key_padding_mask)": "key_padding_mask",
    "mask=Padding(jnp.arange(S)[None] < key_value_seq_lengths[:, None])": "key_value_seq_lengths",
    "mask=Dense((jnp.arange(T)[None] < query_seq_lengths[:, None])[:, None, :, None])": ""
    "query_seq_lengths",
    "mask": "attn_mask attention_mask block_mask",
    "mask=Predicate(lambda q, k: ...)": "mask_mod",
    "mask=Causal()": "is_causal causal use_causal_mask",
    "mask=Causal() & Window(...)": "window window_size local_window_size sliding_window",
    "mask=Causal() & Segments(...)": "segment_ids",
    "mask=Segments(q_segment_ids, kv_segment_ids)": "q_segment_ids kv_segment_ids",
    "valid": "attention_mask mask",
    "valid=~key_padding_mask": "key_padding_mask",
    "q_ids": "segment_ids q_segment_ids ids",
    "k_ids": "kv_segment_ids",
    "left": "window window_size size sliding_window",
    "slopes": "alibi_slopes",
    "bias=ALiBi(...)": "alibi_slopes",
    "bias": "attn_bias attention_bias",
    "key": "rng rngs seed prng_key generator k",
    # a model
    "d_model": "hidden_size n_embd n_embed embed_dim emb_dim dim embedding_size features",
    "d_hidden": "hidden_size",
    "num_layers": "n_layer n_layers num_hidden_layers depth",
    "num_heads": "n_head n_heads nhead num_attention_heads",
    "num_kv_heads": "n_kv_heads num_key_value_heads n_key_value_heads",
    "head_dim=qkv_features // num_heads": "qkv_features",
    "head_dim": "d_head",
    "d_ff": "intermediate_size n_inner dim_feedforward mlp_dim d_mlp",
    "max_len": "max_position_embeddings n_positions max_seq_len block_size seq_len context_length "
    "n_ctx",
    "window": "sliding_window window_size",
    "tie_embeddings": "tie_word_embeddings",
    "activation": "hidden_act act_fn",
    "use_bias": "bias",
    "qkv_bias": "attention_bias use_qkv_bias",
    "ff_bias": "mlp_bias",
    "norm": "normalization_type norm_type",
    "norm_order='parallel'": "parallel_attn parallel_attn_mlp use_parallel_residual",
    "norm_order": "norm_first",
    "qk_norm": "normalize_qk use_qk_norm",
    "norm_eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon",
    "positions=Rope(base=...)": "rope_theta rotary_base rotary_emb_base",
    "positions=Rope(dims=...)": "rotary_dim rotary_pct partial_rotary_factor",
    "positions=Rope(scaling=..., factor=...)": "rope_scaling rope_parameters",
    "base": "rope_theta theta rotary_base",
    "dims": "rotary_dim",
    "dropout": "dropout_rate resid_pdrop embd_pdrop lora_dropout hidden_dropout_prob",
    "attention_dropout": "attn_pdrop attention_probs_dropout_prob",
    "model=ModelConfig(dropout=...)": "dropout",
    "init_std": "initializer_range",
    "remat='full'": "gradient_checkpointing",
    "num_classes": "num_labels",
    "vocab_size": "d_vocab n_vocab",
    "dtype": "torch_dtype precision",
    "jax.default_matmul_precision(...) around the call": "precision",
    # an expert, a cache, a file
    "experts=Experts(count=...)": "num_experts num_local_experts n_routed_experts",
    "count": "num_experts num_local_experts n_routed_experts",
    "top_k": "num_experts_per_tok",
    "batch": "batch_size max_batch_size",
    "num_pages": "num_blocks",
    "page_size": "block_size",
    "shard_bytes": "max_shard_size",
    "path_or_id": "pretrained_model_name_or_path model_name model_id",
    "weights": "load_in_8bit load_in_4bit quantization_config",
    "quantize(params, ...)": "load_in_8bit load_in_4bit quantization_config",
    "sharding": "device_map",
    "jax.default_device(...) around the call": "device device_map",
    "leave it out: code of a checkpoint is never run": "trust_remote_code",
    "HF_HOME in the environment": "cache_dir",
    # a run
    "learning_rate": "lr",
    "TrainConfig(learning_rate=...)": "lr",
    "min_learning_rate": "min_lr",
    "steps": "max_steps epochs num_train_epochs num_steps",
    "TrainConfig(steps=...)": "max_steps epochs num_train_epochs num_steps",
    "batch_size": "per_device_train_batch_size",
    "fit(..., resume=True)": "resume_from_checkpoint",
    "optimizer=AdamW(beta1=...)": "adam_beta1 beta1",
    "optimizer=AdamW(beta2=...)": "adam_beta2 beta2",
    "context": "block_size seq_len context_length",
    "accumulation": "gradient_accumulation_steps",
    "clip_norm": "max_grad_norm grad_clip",
    "optimizer=AdamW(weight_decay=...)": "weight_decay",
    "weight_decay": "wd",
    "schedule": "lr_scheduler_type",
    "warmup_steps": "num_warmup_steps warmup warmup_iters",
    "out": "output_dir out_dir",
    "eval_every": "eval_steps eval_interval",
    "checkpoint_every": "save_steps",
    "keep": "save_total_limit",
    "data": "dataset train_file",
    "log_every": "logging_steps log_interval",
    "ignore_label": "ignore_index",
    "init_from": "model_name_or_path base_model",
    # adapters
    "rank": "r lora_r",
    "alpha": "lora_alpha",
    "targets": "target_modules",
    "trained": "modules_to_save",
    "rslora": "use_rslora",
}
"""Arguments of this library, keyed by their names in other libraries. The suggestion is the first
match that the function accepts. A call, such as `stream(...)`, refers to another function. Entries
that begin with "leave it out" have no corresponding argument."""

_OTHER_FLAGS = {
    "num_tokens": "tokens max_new_tokens max_tokens max_length",
    "beams": "num_beams",
    "samples": "num_return_sequences",
    "no_repeat_ngram": "no_repeat_ngram_size",
    "model": "run model_name_or_path base_model",
}
"""Flags whose names differ from the arguments, keyed by their names in other programs."""

_SIDES: dict[str, Callable[[Any], str]] = {
    # jax.nn and flash-attention do not count the query's own key; -1 means no limit
    "local_window_size": lambda n: _window(*(n if isinstance(n, tuple) else (n, n))),
    "window_size": lambda n: _window(*n) if isinstance(n, tuple) else f"Causal() & Window({n})",
}
"""Functions that convert the windows of other libraries."""


def _window(left: int, right: int) -> str:
    """Return the mask for queries that see `left` keys before and `right` keys after their own."""
    sides = [None if n < 0 else n + 1 for n in (left, right)]
    if sides == [None, None]:
        return "None, since both sides are unbounded"
    return f"Window({sides[0]}, {sides[1]})"


def refuse_keywords(
    function: Callable[..., object],
    unknown: Mapping[str, object],
    options: Collection[str] = (),
    name: str | None = None,
) -> None:
    """Raise TypeError if a function was called with unknown keywords.

    The known keywords are those in the signature of the function, and `options`, which it accepts
    as `**options`. If `name` is passed, it replaces the name of the function in the message.
    """
    for keyword, value in unknown.items():
        named = inspect.signature(function).parameters
        known = [x for x in (*named, *options) if x not in ("unknown", "options", "self")]
        hint = meant(keyword, known, value)
        raise TypeError(f"{name or function.__name__}() has no argument {keyword!r}{hint}")


def known_keywords(function: F, name: str | None = None) -> F:
    """Make a function suggest the intended argument for an unknown keyword.

    The suggestion is made before Python checks for missing arguments. For `name`, see
    `refuse_keywords`. If the first parameter is `step` and its value is a string, the error
    contains a hint.
    """
    known = {
        name for name, one in inspect.signature(function).parameters.items()
        if one.kind is not one.POSITIONAL_ONLY
    }  # fmt: skip
    first = next(iter(inspect.signature(function).parameters), None)

    @functools.wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        if not keywords.keys() <= known:
            unknown = {x: keywords[x] for x in keywords if x not in known}
            refuse_keywords(function, unknown, name=name)
        if first == "step" and args and isinstance(args[0], str):
            rule = "must be a step, make_step(model)"
            use = "for text, use transformer_jax.load(FOLDER).generate(TEXT) or the serve command"
            raise ValueError(f"step is {args[0]!r:.60}: {rule}; {use}")
        return function(*args, **keywords)

    return cast(F, checked)


@overload
def config_class(cls: C, /) -> C: ...
@overload
def config_class(*, repr: bool = True) -> Callable[[C], C]: ...
@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
def config_class(cls: Any = None, /, *, repr: bool = True) -> Any:
    """Make a class a frozen, keyword-only dataclass, like all configs.

    The `help` of the class documents the fields. The error for an unknown field suggests the
    intended field.
    """
    if cls is None:
        return functools.partial(config_class, repr=repr)
    new = value_class(kw_only=True, repr=repr)(cls)
    known, init = [field.name for field in dataclasses.fields(new)], new.__init__

    @functools.wraps(init)
    def checked(self: object, *args: object, **fields: object) -> None:
        for name, value in fields.items():
            if name not in known:
                raise TypeError(f"{cls.__name__} has no field {name!r}{meant(name, known, value)}")
        init(self, *args, **fields)

    new.__init__ = checked
    new.__doc__ = _Doc(cls.__doc__ or "")
    return new


class _Doc:
    """Docstring of a config, which collects the field descriptions when it is accessed."""

    def __init__(self, about: str) -> None:
        self.about = about

    def __get__(self, instance: object, owner: type) -> str:
        lines = [inspect.cleandoc(self.about), "", "Fields:"]
        for name, text in field_docs(owner).items():
            lines += textwrap.wrap(f"{name}: {text}", 96, break_on_hyphens=False,
                                   initial_indent="    ", subsequent_indent=" " * 8)  # fmt: skip
        return "\n".join(lines) if lines[3:] else self.about


@functools.cache
def field_docs(config: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, including inherited fields."""
    bases = (base for base in config.__bases__ if dataclasses.is_dataclass(base))
    docs = {name: text for base in bases for name, text in field_docs(base).items()}
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(config))).body[0]
    except (OSError, TypeError):  # no source, as in a shell or a frozen program
        return docs
    assert isinstance(tree, ast.ClassDef)
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            if isinstance(below.value, ast.Constant) and isinstance(field.target, ast.Name):
                docs[field.target.id] = " ".join(str(below.value.value).split())
    return docs


def meant(name: str, known: Collection[str], value: object = None) -> str:
    """Return the replacement for an unknown keyword, or the nearest known name."""
    sides = _SIDES.get(name)
    if sides is not None and "mask" in known and isinstance(value, int | tuple):
        return f"; use mask={sides(value)}"
    for text, others in _OTHER_NAMES.items():
        elsewhere = re.match(r"[\w.]+\(|leave it out|[A-Z_]+ in ", text)
        if name in others.split() and (elsewhere or re.split(r"\W", text)[0] in known):
            return f"; {text}" if text.startswith("leave") else f"; use {text}"
    return nearest(name, known, least=0.65)


def nearest_flag(flag: str, flags: Collection[str]) -> str:
    """Return the equivalent of another program's flag, or the most similar known flag."""
    name = flag.lstrip("-").replace("-", "_")
    for text, others in (*_OTHER_FLAGS.items(), *_OTHER_NAMES.items()):
        found = re.match(r"(\w+)\b(?!\.)(?:='(\w+)')?", text)
        if name in others.split() and found:
            meant = f"--{found[1].replace('_', '-')}"
            if meant in flags:
                return f"; use {' '.join(filter(None, (meant, found[2])))}"
    return nearest(flag, flags)
