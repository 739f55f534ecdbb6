"""Config of a training run."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.config.fields import (
    Count,
    Fraction,
    NonNegative,
    Positive,
    Size,
    check_types,
    fail,
    unread,
)
from transformer_jax.config.keywords import config_class
from transformer_jax.config.lora import LoraConfig
from transformer_jax.config.mesh import MeshConfig
from transformer_jax.config.model import ModelConfig
from transformer_jax.config.optimizers import AdamW, Muon, Optimizer, ScheduleFree
from transformer_jax.config.tasks import ClassifyTask, LanguageTask, PreferenceTask, Task

Tokenizer = Literal["char", "byte", "bpe", "word", "pretrained"]
TRACKERS = "tensorboard", "wandb", "trackio"
Schedule = Literal["cosine", "linear", "inverse_sqrt", "wsd", "constant"]


@config_class
class TrainConfig:
    """Model, task, data, optimizer, schedule and output of a training run."""

    task: Task = field(default_factory=LanguageTask)
    """Training task."""
    model: AnyModelConfig = field(default_factory=ModelConfig)
    """Model to train."""
    data: str = "python-docs"
    """Training data: a text file, a folder of text files, - for standard input, python-docs,
    shakespeare, or a comma-separated list of folders written by the prepare command. Tasks with
    pairs, classes or messages read one file. Tasks that generate their examples read no file."""
    data_weights: tuple[float, ...] | None = None
    """Relative share of each prepared folder in the training rows, if there are several. None uses
    shares proportional to their sizes."""
    val_data: str | None = None
    """File that contains the held-out data. None holds out the last part of `data`."""
    tokenizer: Tokenizer = "char"
    """Tokenizer. char: the characters in the text. byte: UTF-8 bytes. bpe: byte-pair encoding
    trained on the text. word: words separated by spaces. pretrained: the tokenizer of init_from."""
    init_from: str | None = None
    """Model to start from, along with its tokenizer. It is either a run folder, whose matching
    parameters are used, or the folder or repository ID of a published model."""
    frozen: tuple[str, ...] | None = None
    """Name prefixes of parameters to freeze, such as embed,decoder/block_0."""
    lora: LoraConfig | None = None
    """Low-rank adapters to train for the model in init_from, such as rank=16,targets=all-linear.
    None trains all parameters."""
    bpe_vocab_size: Size = 1024
    """bpe: vocabulary size."""
    word_count: Size = 1
    """word: minimum number of occurrences of a word. Rarer words are replaced by the unknown
    token."""
    text_errors: Literal["strict", "replace"] = "strict"
    """How to treat invalid UTF-8. strict raises an error with the byte offset; replace inserts
    U+FFFD."""
    val_fraction: float = 0.1
    """Fraction of the text to hold out, taken from its end."""
    out: str = "runs/default"
    """Folder of the run."""
    mesh: MeshConfig | None = None
    """Device mesh that splits the run, such as data=2,fsdp=4,tensor=2. None uses one device."""
    steps: Size = 2000
    """Number of optimizer steps."""
    batch_size: Size = 12
    """Total number of sequences in a micro-batch, over all devices."""
    context: Size | None = None
    """Number of tokens in a training sequence. None uses the model's max_len, or 64 if it has
    none."""
    accumulation: Size = 1
    """Number of micro-batches per step. Their gradients are weighted by the number of tokens."""
    learning_rate: Positive = 1e-3
    """Peak learning rate, reached after the warm-up."""
    min_learning_rate: NonNegative = 1e-4
    """Learning rate at the end of the schedule."""
    schedule: Schedule = "cosine"
    """Schedule of the learning rate after the warm-up. cosine and linear: decreases until the end.
    inverse_sqrt: proportional to 1 / sqrt(step) (Vaswani et al. 2017). wsd: constant until the last
    decay_steps steps, then decreases (Hu et al. 2024). constant: does not change."""
    decay_steps: Size | None = None
    """wsd: number of final steps during which the learning rate decreases. None uses a tenth of
    steps."""
    warmup_steps: Count | None = None
    """Number of steps in the linear warm-up from 0. None uses 100, but at most a tenth of steps."""
    optimizer: Optimizer = field(default_factory=AdamW)
    """Optimizer: adamw, sgd, adafactor, lion, muon or schedulefree."""
    clip_norm: Positive = 1.0
    """Maximum global norm of the gradient."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage dtype of the parameters. bfloat16 halves their memory. Steps are computed in float32
    and rounded stochastically, so that small steps take effect on average."""
    ema_decay: Fraction | None = None
    """Decay rate of a float32 moving average of the parameters, which is evaluated and used instead
    of the parameters (Polyak & Juditsky 1992). None disables the average."""
    label_smoothing: Fraction = 0.0
    """Fraction of the probability of each label to spread over the vocabulary. Only used in
    training."""
    z_loss: NonNegative = 0.0
    """Coefficient of log(Z)^2 in the training loss, where Z is the denominator of the softmax. A
    value of 1e-4 prevents the logits from drifting (Chowdhery et al. 2022, section 5)."""
    loss_chunk: Size | None = None
    """Number of tokens per row for which the loss computes logits at a time. None chooses a number
    by size. A number of at least the row length computes all logits at once."""
    eval_every: Size = 250
    """Number of steps between evaluations on the held-out data."""
    eval_batches: Size | None = None
    """Number of random batches per evaluation. None evaluates on all held-out data."""
    checkpoint_every: Size = 500
    """Number of steps between checkpoints. The best and the last checkpoints are always kept."""
    keep: Size = 2
    """Number of most recent checkpoints to keep."""
    log_every: Size = 10
    """Number of steps between two lines of metrics.jsonl."""
    log: tuple[str, ...] | None = None
    """Trackers that also receive the metrics: tensorboard, wandb or trackio."""
    profile: str | None = None
    """Range of steps to profile, such as 10-12. The profile is written to OUT/profile."""
    dump_batch: float | None = None
    """Factor that defines a loss spike. If the loss of a step is not finite, or exceeds this factor
    times the median of the last 50 losses, the batch is saved to OUT/spikes."""
    sample_tokens: Count = 400
    """Number of tokens to generate as a sample at the end of the run. 0 disables the sample."""
    seed: int = 0
    """Random seed of the run."""

    def __post_init__(self) -> None:
        check_types(self)
        if not 0.0 < self.val_fraction < 1.0:
            fail("val_fraction", self.val_fraction, "must be between 0 and 1")
        if self.data_weights is not None and min(self.data_weights, default=0) <= 0:
            fail("data_weights", self.data_weights, "must be positive")
        if self.min_learning_rate > self.learning_rate:
            rule = f"must not exceed learning_rate, {self.learning_rate}"
            fail("min_learning_rate", self.min_learning_rate, rule)
        if not 0 <= self.seed < 2**32:
            fail("seed", self.seed, "must be at least 0 and below 2**32")
        self.task.check_model(self.model)
        self.model.check_training(self)
        if self.dump_batch is not None and self.dump_batch <= 1:
            fail("dump_batch", self.dump_batch, "must be above 1")
        log = self.log or ()
        if not {*log} <= {*TRACKERS} or len({*log}) < len(log):
            fail("log", self.log, f"must be some of {', '.join(TRACKERS)}, each at most once")
        if self.profile is not None:
            parts = self.profile.split("-")
            # `isdigit` also accepts superscripts, which `int` rejects, and digits from other
            # scripts
            if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
                fail("profile", self.profile, "must be a first and a last step, such as 10-12")
            if not 1 <= int(parts[0]) <= int(parts[1]) <= self.steps:
                fail("profile", self.profile, f"must be steps from 1 to {self.steps}, in order")
        longest = self.model.max_len
        if self.context is not None and longest is not None and self.context > longest:
            fail("context", self.context, f"must be at most the model's max_len, {longest}")
        if isinstance(self.optimizer, Muon):
            self.model.check_supports("muon", "optimizer", "muon", "the blocks of transformers")
        if isinstance(self.optimizer, ScheduleFree):
            # the average of this optimizer replaces both the schedule and the average of
            # `ema_decay`
            needed = dict(schedule="constant", param_dtype="float32", ema_decay=None)
            for name, value in needed.items():
                if getattr(self, name) != value:
                    rule = f"must be {value!r} for optimizer 'schedulefree'"
                    fail(name, getattr(self, name), rule)
        if (mesh := self.mesh) is not None:
            self.model.check_supports("mesh", "mesh", str(mesh))
            if getattr(self.model, "invariant", False):
                fail("mesh", str(mesh), "must be None for a model with invariant=True")
            if self.batch_size % mesh.row_shards:
                rule = f"must be a multiple of {mesh.row_shards}, since mesh {mesh} splits the rows"
                fail("batch_size", self.batch_size, rule)
            if mesh.context > 1:
                if self.sequence_len % mesh.context:
                    rule = f"context must divide the length of the rows, {self.sequence_len}"
                    fail("mesh", str(mesh), rule)
                if isinstance(self.task, PreferenceTask):
                    fail("mesh", str(mesh), "context does not support the task 'preference'")
                kind = getattr(self.model, "kind", None)
                if kind not in ("decoder", "encoder") or self.model.inputs is not None:
                    rule = "context needs a decoder or encoder of tokens"
                    fail("mesh", str(mesh), rule)
                if getattr(self.model, "has_state", False):
                    rule = "context does not support layers with a state, which read whole rows"
                    fail("mesh", str(mesh), rule)
            count = 1 if self.model.experts is None else self.model.experts.count
            if count % mesh.expert:
                found = "there are none" if self.model.experts is None else f"there are {count}"
                fail(
                    "mesh",
                    str(mesh),
                    f"expert must divide the number of experts in the model, but {found}",
                )
        if self.bpe_vocab_size < 257:
            rule = "must be at least 257 (256 bytes and one merge)"
            fail("bpe_vocab_size", self.bpe_vocab_size, rule)
        if (self.tokenizer == "pretrained") != (self.init_from is not None):
            rule = f"must be 'pretrained' if and only if init_from is set ({self.init_from!r})"
            fail("tokenizer", self.tokenizer, rule)
        if self.lora is not None:
            self.model.check_supports("adapters", "lora", "LoraConfig")
            if isinstance(self.optimizer, Muon):
                fail("optimizer", "muon", "applies to kernels, but lora trains none")
            if isinstance(self.task, PreferenceTask) and self.lora.trained:
                rule = "must be () for task 'preference', whose reference model is the base"
                fail("lora.trained", self.lora.trained, rule)
            rule = "cannot be used with lora: use lora.base and lora.trained"
            unread(self, rule, "frozen", "param_dtype")
        # a run must not silently ignore a field that was set
        if not self.model.supports("output_layer"):
            rule = "needs a transformer"
            if isinstance(self.model, ModelConfig):
                rule = "must be None for a model with invariant=True, whose loss reads all logits"
            unread(self, rule, "loss_chunk")
        if isinstance(self.task, ClassifyTask):
            unread(self, "needs a task with token labels", "loss_chunk")
        if isinstance(self.task, PreferenceTask):
            if getattr(self.model, "invariant", False):
                rule = "cannot be promised for task 'preference', whose loss is computed in chunks"
                fail("model.invariant", True, rule)
            rule = "needs a cross-entropy loss, which task 'preference' does not have"
            unread(self, rule, "label_smoothing", "z_loss")
        if self.tokenizer != "bpe":
            unread(self, "needs tokenizer 'bpe'", "bpe_vocab_size")
        if self.tokenizer != "word":
            unread(self, "needs tokenizer 'word'", "word_count")
        if self.schedule != "wsd":
            unread(self, "needs schedule 'wsd'", "decay_steps")
        if self.decay_steps is not None and self.decay_steps > self.steps:
            fail("decay_steps", self.decay_steps, f"must not exceed steps, {self.steps}")
        if self.task.makes_examples:
            rule = f"is not used: task {self.task.kind!r} makes its own examples"
            unread(self, rule, "val_data", "data", "data_weights")

    @property
    def warmup(self) -> int:
        """Return the number of warm-up steps."""
        return min(100, self.steps // 10) if self.warmup_steps is None else self.warmup_steps

    @property
    def trained_whole(self) -> tuple[str, ...]:
        """Return the name prefixes of new parameters, which a LoRA run trains in full."""
        if not isinstance(self.task, ClassifyTask):
            return ()
        if self.model.pooling == "transform":
            return "head_dense", "head_norm", "classifier"
        return ("classifier",) if self.model.pooling is None else ("pooler", "classifier")

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """Return the first and last step to profile, counted from 1."""
        if self.profile is None:
            return None
        first, last = self.profile.split("-")
        return int(first), int(last)

    @property
    def sequence_len(self) -> int:
        """Return the number of tokens in a training sequence."""
        if self.context is not None:
            return self.context
        return 64 if self.model.max_len is None else self.model.max_len
