"""Configure one training run."""

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
    """Describe a training run: what to read, how long, how fast, where to write."""

    task: Task = field(default_factory=LanguageTask)
    """The task that the model is trained for."""
    model: AnyModelConfig = field(default_factory=ModelConfig)
    """The model that is trained."""
    data: str = "python-docs"
    """A text file, a folder of them, - for standard input, python-docs, or shakespeare; or what the
    command prepare wrote: a folder, or several with commas between them. Tasks of pairs, classes
    and messages read one file; generated tasks read none."""
    data_weights: tuple[float, ...] | None = None
    """Several prepared folders: the share of each among the rows, up to a factor; None is its share
    of all."""
    val_data: str | None = None
    """A file to hold out; None holds out the last part of `data`."""
    tokenizer: Tokenizer = "char"
    """char: the text's own characters; byte: UTF-8 bytes; bpe: trained on the text; word: what
    stands between spaces; pretrained: that of init_from."""
    init_from: str | None = None
    """Model to start from: the folder of a run, whose parts that fit are taken over, or a published
    model, a folder or an id. The tokenizer is that model's."""
    frozen: tuple[str, ...] | None = None
    """Parameters that stay as they are, by the beginnings of their names: embed,decoder/block_0."""
    lora: LoraConfig | None = None
    """Train low-rank adapters of the model of init_from, which itself stays as it is:
    rank=16,targets=all-linear. None trains all parameters."""
    bpe_vocab_size: Size = 1024
    """bpe: token kinds."""
    word_count: Size = 1
    """word: how often a word must occur to be a token; a rarer one is unknown."""
    text_errors: Literal["strict", "replace"] = "strict"
    """Invalid UTF-8: strict stops and names the offset, replace writes U+FFFD."""
    val_fraction: float = 0.1
    """The last part of the text, held out."""
    out: str = "runs/default"
    """The run folder."""
    mesh: MeshConfig | None = None
    """How the run is split over devices: data=2,fsdp=4,tensor=2. None is one device."""
    steps: Size = 2000
    """Optimizer steps."""
    batch_size: Size = 12
    """Sequences in a micro-batch, on all devices together."""
    context: Size | None = None
    """Tokens in a training sequence; None is the model's max_len, or 64 where it has none."""
    accumulation: Size = 1
    """Micro-batches of a step; their gradients are weighted by tokens."""
    learning_rate: Positive = 1e-3
    """Peak, after the warm-up."""
    min_learning_rate: NonNegative = 1e-4
    """Where the schedule ends."""
    schedule: Schedule = "cosine"
    """After the warm-up: cosine or linear down to the end; inverse_sqrt of the step (Vaswani et
    al. 2017); wsd is constant and falls in the last decay_steps (Hu et al. 2024); or constant."""
    decay_steps: Size | None = None
    """wsd: the last steps, in which the rate falls; None is a tenth of all."""
    warmup_steps: Count | None = None
    """Linear warm-up from 0; None is 100, or a tenth of the steps where that is less."""
    optimizer: Optimizer = field(default_factory=AdamW)
    """The optimizer, which turns a gradient into a step: adamw, sgd, adafactor, lion, muon or
    schedulefree."""
    clip_norm: Positive = 1.0
    """Largest global norm of the gradient."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """What parameters are held in. bfloat16 takes half the memory: a step is computed in float32
    and rounded at random, up or down, so that small steps count on average."""
    ema_decay: Fraction | None = None
    """Decay of an average of the parameters over the steps, in float32; it is what is evaluated and
    used (Polyak & Juditsky 1992). None keeps none."""
    label_smoothing: Fraction = 0.0
    """Share of a label's probability spread over the vocabulary, in training only."""
    z_loss: NonNegative = 0.0
    """Multiplier of log(Z)^2 in the loss of training, Z the denominator of the softmax; 1e-4 keeps
    logits from drifting (Chowdhery et al. 2022, 5)."""
    loss_chunk: Size | None = None
    """Tokens of each row whose logits exist at a time in the loss; None chooses by their size, and
    the length of a row or more makes all of them at once."""
    eval_every: Size = 250
    """Steps between evaluations on the held-out part."""
    eval_batches: Size | None = None
    """Random batches in an evaluation; None reads the whole held-out part."""
    checkpoint_every: Size = 500
    """Steps between checkpoints; the best and the last are always kept."""
    keep: Size = 2
    """How many of the last checkpoints stay."""
    log_every: Size = 10
    """Steps between lines of metrics.jsonl."""
    log: tuple[str, ...] | None = None
    """Where measurements go beside metrics.jsonl: tensorboard, wandb, trackio."""
    profile: str | None = None
    """Steps to record a profile of, as 10-12, into OUT/profile."""
    dump_batch: float | None = None
    """Keep the batch of a step whose loss is more than so many times the median of the last 50, or
    not finite, in OUT/spikes."""
    sample_tokens: Count = 400
    """Length of the sample at the end; 0 writes none."""
    seed: int = 0
    """All randomness follows from it."""

    def __post_init__(self) -> None:
        check_types(self)
        if not 0.0 < self.val_fraction < 1.0:
            fail("val_fraction", self.val_fraction, "must be between 0 and 1")
        if self.data_weights is not None and min(self.data_weights, default=0) <= 0:
            fail("data_weights", self.data_weights, "must be positive")
        if self.min_learning_rate > self.learning_rate:
            rule = f"must not exceed learning_rate {self.learning_rate}"
            fail("min_learning_rate", self.min_learning_rate, rule)
        if not 0 <= self.seed < 2**32:
            fail("seed", self.seed, "must be at least 0 and below 2**32")
        self.task.check_model(self.model)
        self.model.check_training(self)
        if self.dump_batch is not None and self.dump_batch <= 1:
            fail("dump_batch", self.dump_batch, "must be above 1")
        log = self.log or ()
        if not {*log} <= {*TRACKERS} or len({*log}) < len(log):
            fail("log", self.log, f"must name some of {', '.join(TRACKERS)}, each once")
        if self.profile is not None:
            parts = self.profile.split("-")
            # `isdigit` alone takes digits of other scripts, and superscripts, which `int` refuses
            if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
                fail("profile", self.profile, "must be a first and a last step, as 10-12")
            if not 1 <= int(parts[0]) <= int(parts[1]) <= self.steps:
                fail("profile", self.profile, f"must be steps from 1 to {self.steps}, in order")
        longest = self.model.max_len
        if self.context is not None and longest is not None and self.context > longest:
            fail("context", self.context, f"exceeds the model's max_len {longest}")
        if isinstance(self.optimizer, Muon):
            what = "the blocks of transformers"
            self.model.check_supports("muon", "optimizer", "muon", what)
        if isinstance(self.optimizer, ScheduleFree):
            # its average stands for a schedule, and for the average of `ema_decay`
            needed = dict(schedule="constant", param_dtype="float32", ema_decay=None)
            for name, value in needed.items():
                if getattr(self, name) != value:
                    fail(name, getattr(self, name), f"optimizer 'schedulefree' needs {value!r}")
        if (mesh := self.mesh) is not None:
            self.model.check_supports("mesh", "mesh", str(mesh))
            if self.batch_size % mesh.row_shards:
                rule = (
                    f"must be a multiple of {mesh.row_shards}, over which mesh {mesh} splits rows"
                )
                fail("batch_size", self.batch_size, rule)
            count = 1 if self.model.experts is None else self.model.experts.count
            if count % mesh.expert:
                there = "there are none" if self.model.experts is None else f"there are {count}"
                fail("mesh", str(mesh), f"expert must divide the experts of the model: {there}")
        if self.bpe_vocab_size < 257:
            rule = "must be at least 257 (every byte, one merge)"
            fail("bpe_vocab_size", self.bpe_vocab_size, rule)
        if (self.tokenizer == "pretrained") != (self.init_from is not None):
            rule = f"must be 'pretrained' where init_from is given, it is {self.init_from!r}"
            fail("tokenizer", self.tokenizer, rule)
        if self.lora is not None:
            self.model.check_supports("adapters", "lora", "LoraConfig")
            if isinstance(self.optimizer, Muon):
                fail("optimizer", "muon", "is for kernels, and lora trains none")
            if isinstance(self.task, PreferenceTask) and self.lora.trained:
                rule = "task 'preference' compares with the base, which has them as they were"
                fail("lora.trained", self.lora.trained, rule)
            rule = (
                "with lora, lora.base and lora.trained say what stays as it is, and how it is held"
            )
            unread(self, rule, "frozen", "param_dtype")
        # a field that nothing reads would be a wish that a run silently ignores
        if not self.model.supports("output_layer"):
            unread(self, "needs a transformer", "loss_chunk")
        if isinstance(self.task, ClassifyTask):
            unread(self, "needs a task with labels of tokens", "loss_chunk")
        if isinstance(self.task, PreferenceTask):
            rule = "is of a cross-entropy, which 'preference' has not"
            unread(self, rule, "label_smoothing", "z_loss")
        if self.tokenizer != "bpe":
            unread(self, "needs tokenizer 'bpe'", "bpe_vocab_size")
        if self.tokenizer != "word":
            unread(self, "needs tokenizer 'word'", "word_count")
        if self.schedule != "wsd":
            unread(self, "needs schedule 'wsd'", "decay_steps")
        if self.decay_steps is not None and self.decay_steps > self.steps:
            fail("decay_steps", self.decay_steps, f"must not exceed steps {self.steps}")
        if self.task.makes_examples:
            rule = f"task {self.task.kind!r} makes its own examples"
            unread(self, rule, "val_data", "data", "data_weights")

    @property
    def warmup(self) -> int:
        """Return the steps of the warm-up."""
        return min(100, self.steps // 10) if self.warmup_steps is None else self.warmup_steps

    @property
    def trained_whole(self) -> tuple[str, ...]:
        """Return the beginnings of the parameters that lora trains whole because they are new."""
        if not isinstance(self.task, ClassifyTask):
            return ()
        if self.model.pooling == "transform":
            return "head_dense", "head_norm", "classifier"
        return ("classifier",) if self.model.pooling is None else ("pooler", "classifier")

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """Return the first and the last step of a profile, from 1 on."""
        if self.profile is None:
            return None
        first, last = self.profile.split("-")
        return int(first), int(last)

    @property
    def sequence_len(self) -> int:
        """Return the tokens of a training sequence."""
        if self.context is not None:
            return self.context
        return 64 if self.model.max_len is None else self.model.max_len
