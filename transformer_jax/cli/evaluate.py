"""Judge a model on a file that it has not seen, by the measures of the task it was trained for.

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

from transformer_jax.cli.command import ModelOptions, refuse_unread, run, say_unknown
from transformer_jax.cli.flags import WORDS
from transformer_jax.cli.report import missing_metrics
from transformer_jax.config import ConfigError

if TYPE_CHECKING:
    from transformer_jax.text.language_model import LanguageModel
    from transformer_jax.text.scores import Score, Scored


@dataclass(frozen=True, kw_only=True)
class Evaluate(ModelOptions):
    """Options of the command."""

    data: str | None = None
    """A file like the run's own data; for a published model, a text."""
    prompt: str | None = None
    """One text instead: its perplexity, or its class."""
    target: str | None = None
    """Of --prompt: the translation or answer that is scored."""
    text: Path | None = None
    """A text instead: its perplexity, read by sliding windows."""
    window: int | None = None
    """Of --text: tokens of a window; default: max_len."""
    stride: int | None = None
    """Of --text: tokens from window to window; default: half a window."""
    choices: Path | None = None
    """Questions instead, lines {"context": ..., "choices": [...], "answer": INDEX}."""
    batch_size: int | None = None
    """Of --text and --choices: rows that are read side by side; default: 8."""
    targets: str | None = None
    """Of pairs: the file of the targets, line by line."""
    examples: int | None = None
    """Of pairs and signals: decode the first N; default: all."""
    beams: int | None = None
    """Of pairs: beams of the search; default: the run's."""
    context: int | None = None
    """Of a published model: tokens of a window; default: 512."""
    task: str | None = None
    """Of a published model, chat: judge its answers in lines of messages, as a run of the task
    chat is."""
    zero: str | None = None
    """Judge the model with 0 in a place of transformer_jax.places, * any block."""
    heads: tuple[int, ...] | None = field(default=None, metadata=WORDS)
    """Of --zero: these heads; default: all."""
    json: bool = False
    """Print one JSON object."""


READS = {
    "data": ("targets", "examples", "beams", "context", "task"), "prompt": ("target",),
    "text": ("window", "stride", "batch_size"), "choices": ("batch_size",),
}  # fmt: skip
"""The options that say what a model is judged on, and the other options that each of them reads."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 (the model cannot be read) or 2 (usage)."""
    return run(Evaluate, argv, evaluate)


def evaluate(options: Evaluate) -> None:
    """Judge the model on what the options name, and print its measures."""
    given = [name for name in READS if getattr(options, name) is not None]
    if len(given) != 1:
        raise ConfigError(
            "data, prompt, text and choices: give one of them, to say what to judge the model on"
        )
    refuse_unread(options, READS, given[0])
    if options.heads is not None and options.zero is None:
        raise ConfigError(f"heads is {list(options.heads)}: needs zero, the place that has them")
    rows = {} if options.batch_size is None else {"batch_size": options.batch_size}
    found: Mapping[str, float | str]
    if options.data is not None:
        from transformer_jax.text import evaluation
        from transformer_jax.training.progress import DecodingLine

        own: dict[str, Any] = {name: getattr(options, name) for name in READS["data"]}
        model = _load(options)
        found = evaluation.evaluate(model, options.data, **own, report=DecodingLine())
        if (hint := missing_metrics(found)) is not None:
            print(f"evaluate: {hint}", file=sys.stderr)
    elif options.prompt is not None:
        model, prompt, target = _load(options), options.prompt, options.target
        if model.kind in ("targets", "chat") and target is None:
            what = "answer" if model.kind == "chat" else "target"
            raise ConfigError(f"target is None: {model.instead()}: the {what} to score is needed")
        say_unknown("evaluate", model.tokenizers.of_source, [prompt])
        say_unknown("evaluate", model.tokenizer, [target] if target else [])
        if model.kind == "labels":
            if target is not None:
                raise ConfigError(f"target is {target!r}: {model.instead()}")
            label, probability = model.classify(prompt)
            found = {"label": label, "probability": probability}
        else:
            scored: Scored = prompt if target is None else (prompt, target)
            if model.kind == "chat":
                said = {"user": prompt, "assistant": target}
                scored = [{"role": role, "content": content} for role, content in said.items()]
            found = _measures(model.score(scored))
    elif options.text is not None:
        from transformer_jax.tokenizers.plain_text import read_text

        text = read_text(options.text.read_bytes(), str(options.text))
        if not text:
            raise ConfigError(f"text is {str(options.text)!r}: the file is empty")
        model = _load(options)
        if model.kind != "text":
            raise ConfigError(f"text is {str(options.text)!r}: {model.instead()}")
        say_unknown("evaluate", model.tokenizers.of_source, [text])
        windows: dict[str, Any] = {"window": options.window, "stride": options.stride, **rows}
        found = _measures(model.score(text, **windows))
    else:
        from transformer_jax.text.choices import read_questions

        assert options.choices is not None
        questions = read_questions(options.choices)
        chosen = _load(options).multiple_choice(questions, **rows)
        found = {
            "questions": len(questions), "accuracy": chosen.accuracy,
            "accuracy_per_character": chosen.accuracy_per_character,
            "accuracy_per_byte": chosen.accuracy_per_byte,
        }  # fmt: skip
    if options.json:
        from transformer_jax.checkpoints.run_folder import json_text

        print(json_text(dict(found), indent=1))
        return
    # Aligned for a person; `--json` is for programs.
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:{width}}  {value if isinstance(value, str) else f'{value:.6g}'}")


def _load(options: Evaluate) -> LanguageModel:
    """Load the model, edited as the options ask."""
    model = options.load_float32()
    if options.zero is None:
        return model
    from transformer_jax.inside import zero

    return model.edited(zero(options.zero, heads=options.heads and list(options.heads)))


def _measures(score: Score) -> dict[str, float | str]:
    return {
        "tokens": score.num_tokens, "nats": score.nats,
        "nats_per_token": score.nats / score.num_tokens, "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte,
    }  # fmt: skip
