"""Document the fields of configs, and name the argument that a keyword of another library means."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, cast

from transformer_jax.config.fields import nearest

C = TypeVar("C", bound=type)

_OTHER_NAMES = {
    # decoding
    "num_tokens": "max_new_tokens max_tokens max_length",
    "sampler=Sample(Temperature(...))": "temperature",
    "sampler=Sample(TopK(...))": "top_k",
    "sampler=Sample(TopP(...))": "top_p",
    "sampler=Sample(MinP(...))": "min_p",
    "sampler=Sample()": "do_sample",
    "beam_search(..., num_beams=...)": "num_beams",
    "num_results": "num_return_sequences",
    "processors=[RepetitionPenalty(...)]": "repetition_penalty",
    "processors=[NoRepeatNGram(...)]": "no_repeat_ngram_size",
    "processors=[MinLength(...)]": "min_new_tokens min_length",
    "processors": "logits_processor logits_processors",
    "stop": "eos_token_id eos_id stop_token stop_tokens stop_token_ids",
    "prompt": "input_ids inputs tokens",
    "state": "cache kv_cache past_key_values",
    "key": "rng seed prng_key generator k",
    "lengths": "attention_mask",
    "early_exit": "early_stopping",
    "make_step(model, edit=...)": "edit",
    "generate(step, ..., capture=...)": "capture",
    # attention
    "mask": "attn_mask attention_mask",
    "mask=Causal()": "is_causal causal",
    "mask=Causal() & Window(...)": "window window_size local_window_size sliding_window",
    "mask=Causal() & Segments(...)": "segment_ids",
    "bias": "attn_bias attention_bias",
    "scale": "sm_scale softmax_scale",
    "softcap": "logits_soft_cap",
    "dropout_rate": "dropout dropout_p",
    "dropout_key": "dropout_rng",
    "implementation": "backend impl attn_implementation",
    "query": "q",
    "value": "v",
    # a model
    "d_model": "hidden_size n_embd n_embed embed_dim emb_dim dim",
    "d_hidden": "hidden_size",
    "num_layers": "n_layer n_layers num_hidden_layers depth",
    "num_heads": "n_head n_heads nhead num_attention_heads",
    "num_kv_heads": "n_kv_heads num_key_value_heads",
    "d_ff": "intermediate_size n_inner dim_feedforward mlp_dim",
    "max_len": "max_position_embeddings n_positions max_seq_len block_size seq_len context_length",
    "window": "sliding_window",
    "tie_embeddings": "tie_word_embeddings",
    "activation": "hidden_act act_fn",
    "use_bias": "bias",
    "norm_eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon",
    "positions": "rope_theta position_embedding_type",
    "dropout": "dropout_rate resid_pdrop embd_pdrop lora_dropout",
    "attention_dropout": "attn_pdrop",
    "init_std": "initializer_range",
    "remat='full'": "gradient_checkpointing",
    "num_classes": "num_labels",
    "dtype": "torch_dtype",
    # a run
    "learning_rate": "lr",
    "steps": "max_steps epochs num_train_epochs num_steps",
    "batch_size": "per_device_train_batch_size",
    "context": "block_size seq_len context_length",
    "accumulation": "gradient_accumulation_steps",
    "clip_norm": "max_grad_norm grad_clip",
    "optimizer=AdamW(weight_decay=...)": "weight_decay",
    "weight_decay": "wd",
    "schedule": "lr_scheduler_type",
    "out": "output_dir",
    "eval_every": "eval_steps",
    "checkpoint_every": "save_steps",
    "keep": "save_total_limit",
    "data": "dataset",
    "log_every": "logging_steps",
    # adapters
    "rank": "r",
    "alpha": "lora_alpha",
    "targets": "target_modules",
    "trained": "modules_to_save",
    "rslora": "use_rslora",
}
"""The arguments of this library, each with the names that other libraries give it."""


def refuse_keywords(
    function: Callable[..., object], unknown: Mapping[str, object], options: Collection[str] = ()
) -> None:
    """Raise TypeError where a function was called with keywords that it does not have.

    It has those of its signature, and `options` that it takes as `**options`.
    """
    for name in unknown:
        named = inspect.signature(function).parameters
        known = [x for x in (*named, *options) if x not in ("unknown", "options")]
        raise TypeError(f"{function.__name__}() has no argument {name!r}{_meant(name, known)}")


def known_fields(cls: C) -> C:
    """Let a config document its fields in `help`, and name the field that an unknown one means."""
    known, own = [field.name for field in dataclasses.fields(cls)], cast(Any, cls)
    init = own.__init__

    @functools.wraps(init)
    def checked(self: object, *args: object, **fields: object) -> None:
        for name in fields:
            if name not in known:
                raise TypeError(f"{cls.__name__} has no field {name!r}{_meant(name, known)}")
        init(self, *args, **fields)

    own.__init__ = checked
    own.__doc__ = _Doc(cls.__doc__ or "")
    return cls


class _Doc:
    """The docstring of a config, which reads the meanings of the fields when it is asked for."""

    def __init__(self, about: str) -> None:
        self.about = about

    def __get__(self, instance: object, owner: type) -> str:
        lines = [inspect.cleandoc(self.about), "", "Fields:"]
        for name, text in field_docs(owner).items():
            lines += textwrap.wrap(f"{name}: {text}", 96, initial_indent="    ",
                                   subsequent_indent=" " * 8)  # fmt: skip
        return "\n".join(lines) if lines[3:] else self.about


@functools.cache
def field_docs(config: type) -> dict[str, str]:
    """Return the string below each field of a dataclass, inherited fields included."""
    bases = (base for base in config.__bases__ if dataclasses.is_dataclass(base))
    docs = {name: text for base in bases for name, text in field_docs(base).items()}
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(config))).body[0]
    except (OSError, TypeError):  # a class that was typed in, or a program without its source
        return docs
    assert isinstance(tree, ast.ClassDef)
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            if isinstance(below.value, ast.Constant) and isinstance(field.target, ast.Name):
                docs[field.target.id] = " ".join(str(below.value.value).split())
    return docs


def _meant(name: str, known: Collection[str]) -> str:
    """Return what to write in the place of a keyword, or the nearest name that is known.

    Where another function is meant, its call is written: `beam_search(...)`.
    """
    for text, others in _OTHER_NAMES.items():
        head = re.split(r"\W", text)[0]
        if name in others.split() and (head in known or text.startswith(f"{head}(")):
            return f", meant: {text}"
    return nearest(name, known)
