"""Judge a model on a file that it has not seen, by the measures of the task it was trained for.

python -m transformer_jax evaluate --run RUN --data FILE
python -m transformer_jax evaluate --model FOLDER_OR_ID --data FILE
python -m transformer_jax evaluate --run RUN --prompt TEXT
python -m transformer_jax evaluate --run RUN --text FILE --window 512 --stride 256
python -m transformer_jax evaluate --run RUN --choices FILE.jsonl
python -m transformer_jax evaluate --run RUN --data FILE --zero block_0/attention/heads --heads 2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_jax.cli.command import (
    Parser,
    add_model,
    check_either,
    load_either,
    run,
    say_unknown,
)
from transformer_jax.cli.report import missing_metrics
from transformer_jax.config import ConfigError

if TYPE_CHECKING:
    from transformer_jax.models.places import Edit
    from transformer_jax.use.scores import Score, Scored

_OPTIONS = {
    "data": ("targets", "examples", "beams", "context", "task"),
    "prompt": ("target",),
    "text": ("window", "stride", "batch_size"),
    "choices": ("batch_size",),
}
"""The flags that say what a model is judged on, and the other flags that each of them takes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 (the model cannot be read) or 2 (usage)."""
    return run(_parser(), argv, _evaluate)


def _evaluate(arguments: argparse.Namespace) -> None:
    check_either(arguments)
    for name in ("context", "task"):
        if arguments.run is not None and (value := getattr(arguments, name)) is not None:
            raise ConfigError(f"{name} is {value!r}: needs model, a run has its own")
    given = [name for name in _OPTIONS if getattr(arguments, name) is not None]
    if len(given) != 1:
        raise ConfigError(
            "data, prompt, text and choices: give one of them, to say what to judge the model on"
        )
    own = _OPTIONS[given[0]]
    for names in _OPTIONS.values():
        for name in names:
            if (value := getattr(arguments, name)) is not None and name not in own:
                needed = " or ".join(of for of, options in _OPTIONS.items() if name in options)
                raise ConfigError(f"{name} is {value!r}: needs {needed}")
            if isinstance(value, int) and value < 1:
                raise ConfigError(f"{name} is {value}: must be at least 1")
    if arguments.heads is not None and arguments.zero is None:
        raise ConfigError(f"heads is {arguments.heads}: needs zero, the place that has them")
    work = {"data": _judge, "prompt": _score, "text": _read_windows, "choices": _choose}
    work[given[0]](arguments)


def _judge(arguments: argparse.Namespace) -> None:
    """Print the measures of the task."""
    from transformer_jax.training.progress import DecodingLine
    from transformer_jax.use import evaluation

    options = {name: getattr(arguments, name) for name in _OPTIONS["data"]}
    model = load_either("evaluate", arguments)
    report, edit = DecodingLine(), _edit(arguments)
    found = evaluation.evaluate(model, arguments.data, **options, report=report, edit=edit)
    if (hint := missing_metrics(found)) is not None:
        print(f"evaluate: {hint}", file=sys.stderr)
    _print(arguments, found)


def _score(arguments: argparse.Namespace) -> None:
    """Print how likely a model finds a text, or the class that it gives it."""
    model = load_either("evaluate", arguments)
    prompt, target = arguments.prompt, arguments.target
    if model.kind in ("targets", "chat") and target is None:
        what = "answer" if model.kind == "chat" else "target"
        raise ConfigError(f"target is None: {model.instead()}: the {what} to score is needed")
    text: Scored = prompt if target is None else (prompt, target)
    if model.kind == "chat":
        said = {"user": prompt, "assistant": target}
        text = [{"role": role, "content": content} for role, content in said.items()]
    say_unknown("evaluate", model.tokenizers.of_source, [prompt])
    say_unknown("evaluate", model.tokenizer, [target] if target else [])
    if model.kind == "labels":
        if target is not None:
            raise ConfigError(f"target is {target!r}: {model.instead()}")
        label, probability = model.classify(prompt, edit=_edit(arguments))
        _print(arguments, {"label": label, "probability": probability})
        return
    _print_score(arguments, model.score(text, edit=_edit(arguments)))


def _read_windows(arguments: argparse.Namespace) -> None:
    """Print how likely a model finds the text of a file, which it reads in windows."""
    from transformer_jax.tokenizers.plain_text import read_text

    text = read_text(Path(arguments.text).read_bytes(), arguments.text)
    if not text:
        raise ConfigError(f"text is {arguments.text!r}: the file is empty")
    model = load_either("evaluate", arguments)
    if model.kind != "text":
        raise ConfigError(f"text is {arguments.text!r}: {model.instead()}")
    say_unknown("evaluate", model.tokenizers.of_source, [text])
    rows = {} if arguments.batch_size is None else {"batch_size": arguments.batch_size}
    windows = dict(window=arguments.window, stride=arguments.stride)
    score = model.score(text, **windows, **rows, edit=_edit(arguments))
    _print_score(arguments, score)


def _choose(arguments: argparse.Namespace) -> None:
    """Print how often a model finds the right choice the likeliest."""
    from transformer_jax.use.choices import read_questions

    questions = read_questions(arguments.choices)
    rows = {} if arguments.batch_size is None else {"batch_size": arguments.batch_size}
    model = load_either("evaluate", arguments)
    found = model.multiple_choice(questions, **rows, edit=_edit(arguments))
    _print(arguments, {
        "questions": len(questions), "accuracy": found.accuracy,
        "accuracy_per_character": found.accuracy_per_character,
        "accuracy_per_byte": found.accuracy_per_byte,
    })  # fmt: skip


def _edit(arguments: argparse.Namespace) -> dict[str, Edit]:
    """Return the edit that the flags ask for."""
    if arguments.zero is None:
        return {}
    from transformer_jax.inside import zero

    return zero(arguments.zero, heads=arguments.heads)


def _print_score(arguments: argparse.Namespace, score: Score) -> None:
    _print(arguments, {
        "tokens": score.num_tokens, "nats": score.nats,
        "nats_per_token": score.nats / score.num_tokens, "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte,
    })  # fmt: skip


def _print(arguments: argparse.Namespace, found: Mapping[str, float | str]) -> None:
    from transformer_jax.checkpoints.run_folder import json_text

    width = max(map(len, found))
    shown = {name: v if isinstance(v, str) else f"{v:.6g}" for name, v in found.items()}
    lines = "\n".join(f"{name:{width}}  {value}" for name, value in shown.items())
    print(json_text(dict(found), indent=1) if arguments.json else lines)


def _parser() -> Parser:
    parser = Parser("evaluate", "Judge a model on a file that it has not seen.")
    add = parser.add_argument
    add_model(parser)
    add(
        "--data",
        metavar="FILE",
        help="what to judge on: a file like the run's own data; of --model a text",
    )
    add("--prompt", metavar="TEXT", help="one text instead: its perplexity, or its class")
    add(
        "--target",
        metavar="TEXT",
        help="of --prompt: the translation or answer that is scored",
    )
    add("--text", metavar="FILE", help="a text instead: its perplexity, read by sliding windows")
    add("--window", type=int, metavar="N", help="of --text: tokens of a window; default: max_len")
    add(
        "--stride",
        type=int,
        metavar="N",
        help="of --text: tokens from window to window; default: half a window",
    )
    add(
        "--choices",
        metavar="FILE",
        help='questions instead, lines {"context": ..., "choices": [...], "answer": INDEX}',
    )
    add(
        "--batch-size",
        type=int,
        metavar="N",
        help="of --text and --choices: rows that are read side by side; default: 8",
    )
    add("--targets", metavar="FILE", help="of pairs: the file of the targets, line by line")
    add(
        "--examples",
        type=int,
        metavar="N",
        help="of pairs and signals: decode the first N; default: all",
    )
    add("--beams", type=int, metavar="N", help="of pairs: beams of the search; default: the run's")
    add("--context", type=int, metavar="N", help="of --model: tokens of a window; default: 512")
    add(
        "--task",
        metavar="chat",
        help="of --model: judge its answers in lines of messages, as a run of the task chat is",
    )
    add(
        "--zero",
        metavar="PLACE",
        help="judge the model with 0 in a place of transformer_jax.places, * any block",
    )
    add("--heads", type=int, nargs="+", metavar="N", help="of --zero: these heads; default: all")
    add("--json", action="store_true", help="print one JSON object")
    return parser
