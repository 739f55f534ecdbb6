"""Draw what each token of a text looks at: the attention weights of every layer and head.

python -m transformer_jax attention --run RUN --prompt TEXT --out map.png
python -m transformer_jax attention --model FOLDER_OR_ID --prompt TEXT --layer 5 --head 1
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from transformer_jax.cli.command import (
    Parser,
    add_model,
    check_picture,
    load_either,
    run,
    say_unknown,
)
from transformer_jax.config import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 (the model cannot be read) or 2 (usage)."""
    return run(_parser(), argv, _draw)


def _draw(arguments: argparse.Namespace) -> None:
    check_picture(arguments.out)
    if not arguments.prompt:
        raise ConfigError(f"prompt is {arguments.prompt!r}: the text to look at is needed")
    model = load_either("attention", arguments)
    prompt: str = arguments.prompt
    text: str | tuple[str, str] = prompt
    say_unknown("attention", model.tokenizers.of_source, [prompt], model.masks)
    if model.kind == "targets":
        target = model.generate(prompt) if arguments.target is None else arguments.target
        text = prompt, target
        print(f"{prompt} -> {target}")
    elif arguments.target is not None:
        rule = f"{model.instead()}, and has no targets"
        raise ConfigError(f"target is {arguments.target!r}: {rule}")
    seen = model.attend(text)
    figure = seen.plot(part=arguments.part, layer=arguments.layer, head=arguments.head)
    figure.savefig(arguments.out)
    print(f"drawn: {arguments.out}")


def _parser() -> Parser:
    about = "Draw what each token of a text looks at, in every layer and head."
    parser = Parser("attention", about)
    add = parser.add_argument
    add_model(parser)
    add("--prompt", metavar="TEXT", help="the text, or an encoder-decoder's source")
    add(
        "--target", metavar="TEXT",
        help="of pairs: the target that is looked at; default: what the model writes",
    )  # fmt: skip
    add(
        "--part", choices=("self", "cross", "encoder"),
        help="of an encoder-decoder: one kind of attention; default: all",
    )  # fmt: skip
    add("--layer", type=int, metavar="N", help="one layer, from 0 on; default: all")
    add("--head", type=int, metavar="N", help="one head, from 0 on; default: all")
    add(
        "--out", type=Path, default=Path("attention.png"), metavar="FILE",
        help="the picture, .png, .svg or .pdf, which replaces a file of that name; default: "
        "attention.png",
    )  # fmt: skip
    return parser
