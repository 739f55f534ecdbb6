"""Rows of the table: combinations of model, optimizer and task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from transformer_jax.config import (
    SGD,
    Adafactor,
    AdamW,
    Experts,
    Lion,
    LoraConfig,
    ModelConfig,
    Muon,
    Rope,
    ScheduleFree,
    TrainConfig,
    fine_tuning,
)
from transformer_jax.config.tasks import (
    AdditionTask,
    ChatTask,
    ClassifyTask,
    CopyTask,
    DatesTask,
    DigitsTask,
    LanguageTask,
    MaskedTask,
    ModularTask,
    PreferenceTask,
    PrefixTask,
    RecallTask,
    ReverseTask,
    Seq2SeqTask,
    TonesTask,
)
from transformer_jax.loading import load_run
from transformer_jax.training.loop import fit

WORDS = "to be or not that is the question whether tis nobler in the mind".split()
LINES = [" ".join(WORDS[i % 9 : i % 9 + 1 + i % 4]) for i in range(60)]

DENSE = ModelConfig(
    d_model=16, num_heads=4, num_kv_heads=2, num_layers=2, d_ff=8, max_len=48, positions=Rope(),
    glu=True, init_std=0.2,
)  # fmt: skip
EXPERTS = Experts(count=4, top_k=2, balance_loss=0.1, z_loss=0.01)
MIXED = replace(DENSE, experts=EXPERTS)
ENCODER, BOTH = replace(MIXED, kind="encoder"), replace(MIXED, kind="encoder-decoder")


@dataclass(frozen=True)
class Case:
    """One row: the fields of its run that differ from `RUN`."""

    changes: Mapping[str, Any]
    from_base: bool = False
    """Whether the run starts from the one that `base` trains."""
    updates: bool = False
    """Compare the optimizer's updates for random gradients: the gradients of two layouts differ by
    rounding, so an optimizer that steps by a sign may differ by full steps."""
    evaluated: bool = False
    """Also compare the loss of held-out examples."""
    rounded: bool = False
    """Parameters are rounded stochastically: compare only the numbers of the first step."""


def of_model(model: ModelConfig = DENSE, **changes: Any) -> Case:
    return Case(dict(model=replace(model, **changes)))


def of_experts(**changes: Any) -> Case:
    return of_model(MIXED, experts=replace(EXPERTS, **changes))


def of_task(task: Any, model: ModelConfig = MIXED, **changes: Any) -> Case:
    return Case(dict(task=task, model=model, **changes), evaluated=True)


def of_optimizer(optimizer: Any, **changes: Any) -> Case:
    changes = dict(learning_rate=0.01, clip_norm=1.0, model=MIXED) | changes
    return Case(dict(optimizer=optimizer, **changes), updates=True)


PACKED, PADDED = LanguageTask(documents="lines"), LanguageTask(documents="lines", packed=False)

CASES: dict[str, Case] = {
    # tasks, all with experts, so that the router also gets padding and packed rows
    "task language, windows": of_task(LanguageTask()),
    "task language, packed documents": of_task(PACKED),
    "task language, padded documents": of_task(PADDED),
    "task masked": of_task(MaskedTask(), ENCODER),
    "task seq2seq": of_task(Seq2SeqTask(judged=0), BOTH),
    "task seq2seq, two vocabularies": of_task(Seq2SeqTask(judged=0, vocabulary="separate"), BOTH),
    "task prefix, packed": of_task(PrefixTask(judged=0)),
    "task prefix, padded, causal": of_task(PrefixTask(judged=0, packed=False, bidirectional=False)),
    "task classify, decoder": of_task(ClassifyTask()),
    "task classify, encoder": of_task(ClassifyTask(), ENCODER),
    "task chat, packed": of_task(ChatTask()),
    "task chat, padded": of_task(ChatTask(packed=False)),
    "task preference": Case(dict(task=PreferenceTask()), from_base=True),
    "task reverse": of_task(ReverseTask(judged=0, examples=60), BOTH),
    "task copy": of_task(CopyTask(judged=0, examples=60)),
    "task addition": of_task(AdditionTask(judged=0, examples=60)),
    "task dates": of_task(DatesTask(judged=0, examples=60), BOTH),
    "task recall": of_task(RecallTask(judged=0, examples=60)),
    "task modular": of_task(ModularTask(judged=0, examples=60)),
    "task digits, encoder": of_task(
        DigitsTask(judged=0, examples=60), DigitsTask().fit_model(ENCODER)
    ),
    "task digits, encoder-decoder": of_task(
        DigitsTask(judged=0, examples=60), DigitsTask().fit_model(BOTH)
    ),
    "task tones": of_task(TonesTask(judged=0, examples=60), TonesTask().fit_model(BOTH)),
    # optimizers
    "optimizer adamw": of_optimizer(AdamW()),
    "optimizer sgd": of_optimizer(SGD(momentum=0.9)),
    "optimizer adafactor": of_optimizer(Adafactor(smallest_factored=4, clipping=0.5)),
    "optimizer adafactor, nothing factored": of_optimizer(
        Adafactor(smallest_factored=2**20, clipping=0.5)
    ),
    "optimizer lion": of_optimizer(Lion()),
    "optimizer muon": of_optimizer(Muon()),
    "optimizer schedulefree": of_optimizer(ScheduleFree()),
    "optimizer adafactor, lora": replace(
        of_optimizer(
            Adafactor(smallest_factored=2, clipping=0.5), lora=LoraConfig(targets="all-linear")
        ),
        from_base=True,
    ),
    "ema_decay": replace(of_optimizer(AdamW(), ema_decay=0.9), updates=False),
    "clip_norm": Case(dict(clip_norm=0.01, model=MIXED)),
    "param_dtype bfloat16": Case(dict(param_dtype="bfloat16", model=MIXED), rounded=True),
    "frozen": Case(dict(frozen=("decoder/norm", "embed"), model=MIXED)),
    "accumulation": Case(dict(accumulation=3, model=MIXED)),
    # losses
    "label_smoothing": Case(dict(label_smoothing=0.1)),
    "z_loss": Case(dict(z_loss=0.01)),
    "loss_chunk": Case(dict(loss_chunk=5, z_loss=0.01, label_smoothing=0.1, model=MIXED)),
    # adapters
    "lora": Case(dict(lora=LoraConfig(rank=3, targets="all-linear")), from_base=True),
    "lora, dropout, one layer": Case(
        dict(lora=LoraConfig(rank=3, dropout=0.2, layers=(1,))), from_base=True
    ),
    "lora, base int8": Case(dict(lora=LoraConfig(rank=3, base="int8")), from_base=True),
    "lora, preference": Case(dict(task=PreferenceTask(), lora=LoraConfig(rank=3)), from_base=True),
    # experts
    "experts": of_experts(),
    "experts, balance_loss 0": of_experts(balance_loss=0.0, z_loss=0.0),
    "experts, top_k 1": of_experts(top_k=1, normalize=False),
    "experts, sigmoid, selection_bias": of_experts(score="sigmoid", selection_bias=True, scale=1.5),
    "experts, shared, router_bias": of_experts(shared_d_ff=8, shared_gate=True, router_bias=True),
    "experts, not gated": of_model(MIXED, glu=False),
    "experts, dropout": of_model(MIXED, dropout=0.2, attention_dropout=0.1),
    "experts, remat full": of_model(MIXED, remat="full"),
    # the model
    "dense": of_model(),
    "positions none": of_model(positions=None),
    "positions learned": of_model(positions="learned"),
    "positions sinusoidal": of_model(positions="sinusoidal"),
    "positions shaw": of_model(positions="shaw"),
    "positions t5": of_model(positions="t5"),
    "positions alibi": of_model(positions="alibi"),
    "window, sink_tokens": of_model(window=5, sink_tokens=2),
    "window, a pattern": of_model(window=(5, None)),
    "norm_order post, embedding_norm": of_model(norm_order="post", embedding_norm=True),
    "norm_order sandwich, rmsnorm": of_model(
        norm_order="sandwich", norm="rmsnorm", norm_unit_offset=True
    ),
    "norm_order output": of_model(norm_order="output"),
    "norm_order parallel": of_model(norm_order="parallel"),
    "norm_order parallel_shared, no biases": of_model(norm_order="parallel_shared", use_bias=False),
    "norm none": of_model(norm=None),
    "qk_norm, attention_sinks, attention_gate": of_model(
        qk_norm=True, attention_sinks=True, attention_gate=True
    ),
    "qk_norm_over own_head, attention_softcap": of_model(
        qk_norm=True, qk_norm_over="own_head", attention_softcap=3.0
    ),
    "qk_norm_bias, qk_norm_after_rope, activation xielu": of_model(
        qk_norm=True,
        qk_norm_kind="layernorm",
        qk_norm_bias=True,
        qk_norm_after_rope=True,
        activation="xielu",
        glu=False,
    ),
    "qk_norm_over heads": of_model(qk_norm=True, qk_norm_over="heads"),
    "output matrix, logit_bias, logit_softcap": of_model(
        tie_embeddings=False,
        logit_bias=True,
        logit_softcap=5.0,
        scale_embeddings=True,
        logit_scale=0.5,
    ),
    "scales of Granite": of_model(embedding_scale=3.0, residual_scale=0.5, attention_scale=0.3),
    "num_kv_heads 1, head widths": of_model(num_kv_heads=1, head_dim=6, value_head_dim=10),
    "d_ff 0": of_model(d_ff=0, glu=False),
    "glu_limit, glu_unit_offset": of_model(glu_limit=1.0, glu_unit_offset=True, activation="silu"),
    "dropout": of_model(dropout=0.2),
    "attention_dropout": of_model(attention_dropout=0.2),
    "remat attention": of_model(remat="attention"),
    "remat dots": of_model(remat="dots"),
    "remat full": of_model(remat="full"),
    "implementation blockwise": of_model(implementation="blockwise"),
    "implementation native": of_model(implementation="native"),
    "encoder, first_norm": of_task(
        MaskedTask(), replace(DENSE, kind="encoder", embedding_norm=True, first_norm=False)
    ),
    "encoder, share_layers, embedding_dim": of_task(
        MaskedTask(),
        replace(
            DENSE,
            kind="encoder",
            share_layers=True,
            embedding_dim=12,
            masked_token_head=True,
            logit_bias=True,
            type_vocab_size=2,
        ),
    ),
    "encoder, pooler transform": of_task(
        ClassifyTask(), replace(DENSE, kind="encoder", pooler="transform", pooler_reads="mean")
    ),
    "encoder-decoder, num_decoder_layers": of_task(
        Seq2SeqTask(judged=0), replace(DENSE, kind="encoder-decoder", num_decoder_layers=3)
    ),
}


def run(folder: Path, case: Case, scan: bool) -> TrainConfig:
    """Return the config of a case's run on one device; raises ConfigError if it is rejected."""
    data = dict(
        language="text.txt", masked="text.txt", seq2seq="pairs.tsv", prefix="pairs.tsv",
        classify="classes.tsv", chat="chat.jsonl", preference="answers.jsonl",
    )  # fmt: skip
    changes = dict(case.changes)
    if case.from_base:
        start = fine_tuning(
            load_run(base(folder)).config, base(folder), changes.get("task", PACKED)
        )
        changes |= dict(model=start.model, task=start.task)
        changes |= dict(init_from=base(folder), tokenizer="pretrained")
    changes = dict(model=DENSE, task=PACKED) | changes
    changes["model"] = replace(changes["model"], scan_layers=scan)
    if changes["task"].kind in data:
        changes["data"] = str(folder / data[changes["task"].kind])
    elif changes["task"].kind in ("digits", "tones"):
        changes["context"] = 20
    common = dict(
        out=str(folder / "run"), steps=10, batch_size=8, warmup_steps=0, eval_batches=1,
        schedule="constant", learning_rate=0.5, optimizer=SGD(), clip_norm=1e9, sample_tokens=0,
        val_fraction=0.3,
    )  # fmt: skip
    return TrainConfig(**(common | changes))


@cache
def base(folder: Path) -> str:
    """Train the model that other cases start from, and return its folder."""
    config = TrainConfig(
        model=MIXED, task=PACKED, data=str(folder / "text.txt"), out=str(folder / "base"), steps=1,
        batch_size=8, sample_tokens=0, eval_batches=1, warmup_steps=0,
    )  # fmt: skip
    fit(config)
    return config.out


def write_data(folder: Path) -> None:
    """Write the data files, with texts of many lengths, so that rows are padded."""
    pairs = list(zip(LINES, reversed(LINES), strict=True))
    files = {
        "text.txt": LINES,
        "pairs.tsv": [f"{one}\t{two}" for one, two in pairs],
        "classes.tsv": [f"{'even' if len(line) % 2 else 'odd'}\t{line}" for line in LINES],
        "chat.jsonl": [
            json.dumps({
                "messages": [
                    {"role": "user", "content": one}, {"role": "assistant", "content": two}
                ]
            })
            for one, two in pairs
        ],
        "answers.jsonl": [
            json.dumps({"prompt": one, "chosen": two, "rejected": two[::-1]}) for one, two in pairs
        ],
    }  # fmt: skip
    for name, lines in files.items():
        (folder / name).write_text("\n".join(lines) + "\n")
