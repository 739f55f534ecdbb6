"""Training of dictionaries on the values of a model: `fit(config, task=DictionaryTask(...))`.

The model is frozen. Each step captures the values at a place on windows of the text and updates the
dictionary. Checkpoints, resuming and evaluation work as in any other run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checkpoints import checkpoint
from transformer_jax.checkpoints.run_folder import RunFolder
from transformer_jax.config import ConfigError, ModelConfig, TrainConfig
from transformer_jax.config.fields import Positive, Size, fail
from transformer_jax.config.model import as_transformer
from transformer_jax.config.tasks import CustomTask, LanguageTask
from transformer_jax.interpret.dictionaries import ARRAYS, Dictionary, dictionary_scores
from transformer_jax.interpret.models import resolve_places
from transformer_jax.loading import TextModel, is_run, load_run, load_text_model
from transformer_jax.models.factory import build
from transformer_jax.models.transformer import Decoder
from transformer_jax.pytree import Params, sha256_of
from transformer_jax.training.batch import Batch
from transformer_jax.training.data import IGNORE
from transformer_jax.training.step import windows
from transformer_jax.training.tasks.language import LanguageWindows
from transformer_jax.training.tasks.task import Learner, Report, Tokenizers, TrainingTask

SIZED_BY = 16
"""Number of windows used to estimate the center and the scale of the values."""

JUDGED = 32
"""Number of held-out windows for the final evaluation of a dictionary."""


@dataclass(frozen=True, kw_only=True)
class DictionaryTask(CustomTask):
    """Learn to represent the values at a place as sums of a few directions."""

    of: str
    """The model to study, given as the folder of a run or of a published model."""
    place: str
    """The name of the place to represent, such as block_3/residual."""
    target: str | None = None
    """The place to reconstruct, for a transcoder. None reconstructs `place`."""
    features: Size
    """Number of directions (F)."""
    active: Size | None = None
    """Number of features to keep for each token (TopK). Required unless l1 is set."""
    l1: Positive | None = None
    """Weight of sum_i f_i |W_d,i|, which is added to the squared error. Required unless active is
    set."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.active is None) == (self.l1 is None):
            fail("active", self.active, f"set exactly one of active and l1 (l1 is {self.l1})")
        if self.active is not None and self.active > self.features:
            fail("active", self.active, f"must be at most features, {self.features}")

    @property
    def loaded_by(self) -> str:
        """Return the name of the function that loads runs of this task."""
        return "transformer_jax.interpret.load_dictionary"

    def load(
        self, config: TrainConfig, tokenizers: Tokenizers | None, vocab_size: int | None
    ) -> TrainingTask:
        """Return the windows of the text together with the model that reads them.

        Args:
            config: the config of the run.
            tokenizers: the tokenizers of the run if it is resumed, or None for a new run.
            vocab_size: ignored, because the model has its own vocabulary.
        """
        model = load_run(self.of) if is_run(self.of) else load_text_model(self.of)
        return DictionaryWindows(config, self, model)


def dictionary_learner(
    width: int,
    target_width: int,
    features: int,
    *,
    active: int | None = None,
    l1: float | None = None,
    sizes: tuple[jax.Array, ...] | None = None,
) -> Learner:
    """Return the initialization and the loss of a dictionary for use in a custom task.

    loss = (|y - y'|^2 + l1 sum_i f_i |W_d,i|) / D', averaged over tokens, where y has unit
    variance. Without the L1 term, the loss is about 1 minus the explained variance. W_d is
    initialized with random unit vectors. In an autoencoder, W_e is initialized with their transpose
    (Gao et al. 2024, A.1). In a batch, `tokens` [..., D] contains the values and `labels` [..., D']
    the targets. Only entries marked as `valid` contribute.

    Args:
        width: D, the width of the values.
        target_width: D', the width of the targets.
        features: F, the number of features.
        active: K of TopK; None uses a ReLU.
        l1: the weight of the L1 term; None omits the term.
        sizes: the center [D] and scale [] of the values, then the center [D'] and scale [] of the
            targets; None uses centers of 0 and scales of 1.
    """
    if sizes is None:
        one = jnp.ones(())
        sizes = jnp.zeros(width), one, jnp.zeros(target_width), one

    def init(key: jax.Array) -> Params:
        keys = jax.random.split(key)
        widths = target_width, width
        rows = [jax.random.normal(k, (features, n)) for k, n in zip(keys, widths, strict=True)]
        unit = [x / jnp.linalg.norm(x, axis=1, keepdims=True) for x in rows]
        encoder = unit[0] if width == target_width else unit[1]
        arrays = encoder.T, jnp.zeros(features), unit[0], jnp.zeros(target_width), *sizes
        return dict(zip(ARRAYS, arrays, strict=True))

    def parts(params: Params, batch: Batch) -> tuple[jax.Array, ...]:
        """Return sums over the valid tokens: loss, count, squared error and squared target."""
        # the center and the scale describe the data and are not trained
        constants = {name: jax.lax.stop_gradient(params[name]) for name in ARRAYS[4:]}
        dictionary = Dictionary(**{**params, **constants}, place="", target="", active=active)
        x, y = (jnp.asarray(part).astype(jnp.float32) for part in (batch.tokens, batch.labels))
        lead = y.shape[:-1]
        counts = jnp.ones(lead) if batch.valid is None else jnp.asarray(batch.valid, jnp.float32)
        f = dictionary.encode(x)
        centre = dictionary.target_centre.reshape((1,) * len(lead) + (-1,))
        y, rebuilt = (
            (part - centre) / dictionary.target_size for part in (y, dictionary.decode(f))
        )
        error = ((y - rebuilt) ** 2).sum(axis=-1) / target_width
        total = error
        if l1 is not None:
            # without the lengths, small features with long directions would avoid the penalty
            lengths = jnp.linalg.norm(dictionary.decoder, axis=1)
            total = error + l1 * (f @ lengths) / target_width
        squares = (y**2).sum(axis=-1) / target_width
        return tuple((part * counts).sum() for part in (total, jnp.ones(lead), error, squares))

    def loss(params: Params, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        total, weight, *_ = parts(params, batch)
        # a batch may have no valid token
        return total / jnp.maximum(weight, 1), weight

    def scores(params: Params, batch: Batch) -> jax.Array:  # f32[3]
        total, weight, error, squares = parts(params, batch)
        return jnp.stack([total, weight, weight * (1 - error / jnp.maximum(squares, 1e-30))])

    return Learner(init, loss, scores)


@dataclass(frozen=True)
class _CaptureWindows:
    """Function that maps window starts to a batch that contains the values at two places."""

    config: ModelConfig
    place: str
    target: str
    length: int

    def __call__(
        self,
        params: Params,
        corpus: jax.Array,  # uint or i32[n]
        starts: jax.Array,  # i32[A, B], or [B]
    ) -> Batch:
        batch = windows(corpus, starts, self.length)
        model = build(self.config)

        def values(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:  # [B, T] -> [B, T, D]
            names = self.place, self.target
            found = model.apply({"params": params}, tokens, capture=tuple(dict.fromkeys(names)))
            x, y = (found[-1][name].astype(jnp.float32) for name in names)
            return x.reshape(*tokens.shape, -1), y.reshape(*tokens.shape, -1)

        if starts.ndim == 1:
            x, y = values(batch.tokens)
        else:
            # the model reads one micro-batch at a time
            x, y = (jnp.stack(part) for part in zip(*map(values, batch.tokens), strict=True))
        return Batch(x, y, valid=batch.labels != IGNORE)


class DictionaryWindows(TrainingTask):
    """Training of a dictionary on windows of a long text."""

    def __init__(self, config: TrainConfig, task: DictionaryTask, model: TextModel) -> None:
        studied = model.config
        if not isinstance(studied, ModelConfig) or studied.kind != "decoder":
            raise ConfigError(f"of is {task.of!r}: must be a transformer decoder")
        if config.model != studied:
            rule = "must equal the config of that model, transformer_jax.load(...).config"
            raise ConfigError(f"of is {task.of!r}: model {rule}")
        for field in ("init_from", "lora", "frozen"):
            if getattr(config, field) is not None:
                rule = "must be None: a dictionary starts at random, and the model is frozen"
                raise ConfigError(f"{field} is {getattr(config, field)!r}: {rule}")
        decay = getattr(config.optimizer, "weight_decay", 0.0)
        if decay:
            rule = "must be 0 for a dictionary, because it would shrink the features"
            raise ConfigError(f"optimizer.weight_decay is {decay}: {rule}")
        target = task.place if task.target is None else task.target
        if any(len(resolve_places(build(studied), name)) != 1 for name in (task.place, target)):
            raise ConfigError(
                f"place is {task.place!r}, target {target!r}: each must be a single place"
            )
        text = LanguageWindows(
            replace(config, task=LanguageTask()), Tokenizers(model.tokenizer), studied.vocab_size
        )
        self.task, self.read, self.text = task, model, text
        self.config, self.tokenizers = replace(config, model=text.config.model), text.tokenizers
        self.tokens_per_step = text.tokens_per_step
        self.sha256 = sha256_of([text.data.sha256.encode(), model.params])
        self.target = target
        self.prepare = _CaptureWindows(studied, task.place, target, config.sequence_len)
        self.resident = (model.params, text.data.train)  # type: ignore[assignment]
        self.held_out = (model.params, text.data.val)  # type: ignore[assignment]
        # spread over the text, because its beginning may not be typical
        starts = np.linspace(0, len(text.data.train) - config.sequence_len - 1, SIZED_BY)
        first = jax.jit(self.prepare)(*self.resident, starts.astype(np.int32))
        sizes = []
        for part in (first.tokens, first.labels):
            centre = part.mean(axis=(0, 1))
            sizes += [centre, jnp.sqrt(((part - centre[None, None]) ** 2).mean())]
        self.learner = dictionary_learner(
            first.tokens.shape[-1], first.labels.shape[-1], task.features, active=task.active,
            l1=task.l1, sizes=tuple(sizes),
        )  # fmt: skip

    def inputs(self, step: int) -> np.ndarray:  # i32[A, B]
        """Return the start of each window for a step."""
        return self.text.inputs(step)

    def evaluation(self) -> Iterator[np.ndarray]:  # i32[B] each
        """Yield batches of starts of held-out windows."""
        return self.text.evaluation()

    def described(self) -> str:
        """Return a description of the dictionary and its model in one line."""
        task = self.task
        kind = "" if task.target is None else f" from {task.target}"
        return f"dictionary: {task.features:,} features of {task.place}{kind} of {task.of}"

    def sample(self, params: Params) -> str:
        """Return the scores of the dictionary as text."""
        return "\n".join(f"{name} {value:.4f}" for name, value in self.judge(params).items())

    def judge(self, params: Params, report: Report | None = None) -> dict[str, float]:
        """Return the `dictionary_scores` on the first held-out windows."""
        text = self.text.data.val
        length = self.config.sequence_len
        count = min(JUDGED, len(text) // length)
        tokens = text[: count * length].reshape(count, length).astype(np.int32)
        place, active = self.task.place, self.task.active
        dictionary = Dictionary(**params, place=place, target=self.target, active=active)
        model = build(as_transformer(self.read.config))
        assert isinstance(model, Decoder)  # __init__ has checked it
        found = dictionary_scores(model, self.read.params, dictionary, tokens)
        names = "variance_explained", "l0", "dead", "loss_recovered"
        return {name: float(getattr(found, name)) for name in names}


def load_dictionary(run: str | Path, step: int | None = None) -> Dictionary:
    """Load the dictionary of a `DictionaryTask` run.

    Args:
        run: the folder of the run.
        step: the step of the checkpoint; None loads the last checkpoint.

    Raises:
        ConfigError: if the run has a different task, or if the checkpoint does not exist.
        CheckpointError: if a file is damaged.
    """
    folder = RunFolder(Path(run))
    config = folder.read_config()
    task = config.task
    if not isinstance(task, DictionaryTask):
        rule = f"must be a run with task 'dictionary', not {task.kind!r}"
        raise ConfigError(f"run is {str(run)!r}: {rule}")
    steps = checkpoint.saved_steps(folder.checkpoints)
    if not steps or step not in (None, *steps):
        raise ConfigError(
            f"step is {step}: run {str(run)!r} has checkpoints only for steps {steps}"
        )
    saved = checkpoint.step_path(folder.checkpoints, steps[-1] if step is None else step)
    leaves = checkpoint.read_manifest(saved).leaves
    # the checkpoint contains the shapes, so the model does not have to be loaded
    shapes = {leaf.name.removeprefix("params/"): leaf.shape for leaf in leaves}
    like = {name: jax.ShapeDtypeStruct(shapes[name], jnp.float32) for name in ARRAYS}
    params = checkpoint.restore(saved, {"params": like})["params"]
    target = task.place if task.target is None else task.target
    return Dictionary(**params, place=task.place, target=target, active=task.active)
