"""Evaluate a model on held-out data, with the metrics of its task.

python -m transformer_jax evaluate --model RUN --data FILE
python -m transformer_jax evaluate --model FOLDER_OR_ID --data FILE
python -m transformer_jax evaluate --model RUN --prompt TEXT
python -m transformer_jax evaluate --model RUN --text FILE --window 512 --stride 256
python -m transformer_jax evaluate --model RUN --choices FILE.jsonl
python -m transformer_jax evaluate --model RUN --data FILE --zero block_0/attention/heads --heads 2
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformer_jax.cli.command import ModelOptions, refuse_unread, report_unknown, run
from transformer_jax.cli.flags import WORDS
from transformer_jax.cli.report import missing_metrics
from transformer_jax.config import ConfigError

if TYPE_CHECKING:
    from transformer_jax.text.language_model import LanguageModel
    from transformer_jax.text.scores import Score, ScoreInput


@dataclass(frozen=True, kw_only=True)
class Evaluate(ModelOptions):
    """Command-line options."""

    data: str | None = None
    """A file in the format of the training data; plain text for a published model."""
    prompt: str | None = None
    """A text to evaluate, which prints its perplexity or its class."""
    target: str | None = None
    """With --prompt: the translation or answer to score."""
    text: Path | None = None
    """A text file whose perplexity is computed with sliding windows."""
    window: int | None = None
    """With --text: number of tokens per window; default: max_len."""
    stride: int | None = None
    """With --text: number of tokens between the starts of windows; default: half a window."""
    choices: Path | None = None
    """A file of multiple-choice questions, with lines {"context": ..., "choices": [...], "answer":
    INDEX}."""
    batch_size: int | None = None
    """With --text or --choices: number of rows per batch; default: 8."""
    targets: str | None = None
    """For pairs: a file with one target per line."""
    examples: int | None = None
    """For pairs and signals: number of examples to decode; default: all examples."""
    beams: int | None = None
    """For pairs: number of beams; default: as in the run."""
    context: int | None = None
    """For a published model: number of tokens per window; default: 512."""
    task: str | None = None
    """For a published model: chat scores the answers in lines of messages; default: plain text."""
    zero: str | None = None
    """Place in the model (transformer_jax.places) that is set to 0; * matches any block."""
    heads: tuple[int, ...] | None = field(default=None, metadata=WORDS)
    """With --zero: indices of the heads; default: all heads."""
    json: bool = False
    """Print one JSON object."""


READS = {
    "data": ("targets", "examples", "beams", "context", "task"), "prompt": ("target",),
    "text": ("window", "stride", "batch_size"), "choices": ("batch_size",),
}  # fmt: skip
"""Options that select the data, and the other options that apply to each of them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run(Evaluate, argv, evaluate)


def evaluate(options: Evaluate) -> None:
    """Evaluate the model on the selected data and print its metrics."""
    selected = [name for name in READS if getattr(options, name) is not None]
    if len(selected) != 1:
        raise ConfigError("pass exactly one of data, prompt, text and choices")
    refuse_unread(options, READS, selected[0])
    if options.heads is not None and options.zero is None:
        raise ConfigError(
            f"heads is {list(options.heads)}: also pass zero, the place with these heads"
        )
    rows = {} if options.batch_size is None else {"batch_size": options.batch_size}
    found: Mapping[str, float | str]
    if options.data is not None:
        from transformer_jax.text import evaluation
        from transformer_jax.training.progress import DecodingLine

        settings: dict[str, Any] = {name: getattr(options, name) for name in READS["data"]}
        model = _load(options)
        found = evaluation.evaluate(model, options.data, **settings, report=DecodingLine())
        if (hint := missing_metrics(found)) is not None:
            print(f"evaluate: {hint}", file=sys.stderr)
    elif options.prompt is not None:
        model, prompt, target = _load(options), options.prompt, options.target
        if model.kind in ("targets", "chat") and target is None:
            noun = "answer" if model.kind == "chat" else "target"
            raise ConfigError(f"target is None: {model.instead()}; pass the {noun} to score")
        report_unknown("evaluate", model.tokenizers.of_source, [prompt])
        report_unknown("evaluate", model.tokenizer, [target] if target else [])
        if model.kind == "labels":
            if target is not None:
                raise ConfigError(f"target is {target!r}: {model.instead()}")
            label, probability = model.classify(prompt)
            found = {"label": label, "probability": probability}
        else:
            scored: ScoreInput = prompt if target is None else (prompt, target)
            if model.kind == "chat":
                turns = {"user": prompt, "assistant": target}
                scored = [{"role": role, "content": content} for role, content in turns.items()]
            found = _metrics(model.score(scored))
    elif options.text is not None:
        from transformer_jax.tokenizers.plain_text import read_text

        text = read_text(options.text.read_bytes(), str(options.text))
        # Check before the model is loaded, which may take minutes.
        if not text:
            raise ConfigError(f"text is {str(options.text)!r}: the file is empty")
        model = _load(options)
        if model.kind != "text":
            raise ConfigError(f"text is {str(options.text)!r}: {model.instead()}")
        report_unknown("evaluate", model.tokenizers.of_source, [text])
        windows: dict[str, Any] = {"window": options.window, "stride": options.stride, **rows}
        found = _metrics(model.score(text, **windows))
    else:
        from transformer_jax.text.choices import read_questions

        assert options.choices is not None
        questions = read_questions(options.choices)
        result = _load(options).multiple_choice(questions, **rows)
        found = {
            "questions": len(questions), "accuracy": result.accuracy,
            "accuracy_per_character": result.accuracy_per_character,
            "accuracy_per_byte": result.accuracy_per_byte,
        }  # fmt: skip
    if options.json:
        from transformer_jax.checkpoints.run_folder import json_text

        print(json_text(dict(found), indent=1))
        return
    # Align the numbers for human readers. Programs use `--json`.
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:{width}}  {value if isinstance(value, str) else f'{value:.6g}'}")


def _load(options: Evaluate) -> LanguageModel:
    """Load the model with the edit that `--zero` describes."""
    model = options.load_float32()
    if options.zero is None:
        return model
    from transformer_jax.interpret import zero

    return model.edited(zero(options.zero, heads=options.heads and list(options.heads)))


def _metrics(score: Score) -> dict[str, float | str]:
    return {
        "tokens": score.num_tokens, "nats": score.nats,
        "nats_per_token": score.nats / score.num_tokens, "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte,
    }  # fmt: skip
