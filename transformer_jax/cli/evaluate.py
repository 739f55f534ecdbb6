"""Judge a model on a file that it has not seen, by the measures of the task it was trained for.

python -m transformer_jax evaluate --run RUN --data FILE
python -m transformer_jax evaluate --model FOLDER_OR_ID --data FILE
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from transformer_jax.cli.command import Parser, add_run, load_run, run
from transformer_jax.cli.report import missing_metrics
from transformer_jax.config import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 (the model cannot be read) or 2 (usage)."""
    return run(_parser(), argv, _evaluate)


def _evaluate(arguments: argparse.Namespace) -> None:
    if (arguments.run is None) == (arguments.model is None):
        raise ConfigError("run and model: give one of them")
    for name in ("checkpoint", "init_from"):
        if arguments.model is not None and getattr(arguments, name) is not None:
            raise ConfigError(f"{name} is {getattr(arguments, name)!r}: needs run")
    if arguments.run is not None and arguments.context is not None:
        raise ConfigError(f"context is {arguments.context}: needs model, a run has its own")
    if arguments.data is None:
        raise ConfigError("data is None: the file to judge the model on is needed")
    options = {
        name: getattr(arguments, name) for name in ("targets", "examples", "beams", "context")
    }
    for name, value in options.items():
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"{name} is {value}: must be at least 1")
    from transformer_jax.checkpoints.run_folder import json_text
    from transformer_jax.training.progress import DecodingLine
    from transformer_jax.use import evaluation
    from transformer_jax.use.language_model import LanguageModel, load

    if arguments.run is not None:
        model = LanguageModel(load_run("evaluate", arguments), arguments.run)
    else:
        model = load(arguments.model, dtype="float32")
    found = evaluation.evaluate(model, arguments.data, **options, report=DecodingLine())
    if (hint := missing_metrics(found)) is not None:
        print(f"evaluate: {hint}", file=sys.stderr)
    width = max(map(len, found))
    lines = "\n".join(f"{name:{width}}  {value:.6g}" for name, value in found.items())
    print(json_text(found, indent=1) if arguments.json else lines)


def _parser() -> Parser:
    parser = Parser("evaluate", "Judge a model on a file that it has not seen.")
    add = parser.add_argument
    add_run(parser)
    add("--model", metavar="FOLDER_OR_ID", help="a published decoder or encoder instead")
    add("--data", metavar="FILE", help="what to judge on: a file like the run's own data")
    add("--targets", metavar="FILE", help="of pairs: the file of the targets, line by line")
    add(
        "--examples",
        type=int,
        metavar="N",
        help="of pairs and signals: decode the first N; default: all",
    )
    add("--beams", type=int, metavar="N", help="of pairs: beams of the search; default: the run's")
    add("--context", type=int, metavar="N", help="of --model: tokens of a window; default: 512")
    add("--json", action="store_true", help="print one JSON object")
    return parser
