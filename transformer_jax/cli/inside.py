"""Look inside a model as it reads a text: a picture, or a page that can be hovered.

python -m transformer_jax inside --run RUN --prompt TEXT --what lens --out lens.html
python -m transformer_jax inside --run RUN --prompt TEXT --other TEXT --what patch
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_jax.cli.command import (
    PICTURES,
    Parser,
    add_model,
    check_either,
    check_picture,
    load_either,
    run,
    say_unknown,
)
from transformer_jax.config import ConfigError

if TYPE_CHECKING:
    from transformer_jax.use.tables import Pictured

READS = {
    "lens": (),
    "patch": ("other", "answer", "other_answer"),
    "heads": ("answer", "other_answer"),
    "attribution": ("answer", "other_answer", "baseline"),
}
"""The values of --what, with the flags that each reads besides the prompt."""

LENS_TOKENS = 40
"""Most tokens of a target that the model writes for the lens, or half of its max_len if that is
fewer: a text that is read again may have more tokens than were written."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 (the model cannot be read) or 2 (usage)."""
    return run(_parser(), argv, _look)


def _look(arguments: argparse.Namespace) -> None:
    check_picture(arguments.out, (*PICTURES, ".html"))
    what: str = arguments.what
    if not arguments.prompt:
        raise ConfigError(f"prompt is {arguments.prompt!r}: the text to look at is needed")
    flags = {name: getattr(arguments, name) for names in READS.values() for name in names}
    for name, value in flags.items():
        if value is not None and name not in READS[what]:
            those = " or ".join(one for one, names in READS.items() if name in names)
            raise ConfigError(f"{name} is {value!r}: needs what to be {those}")
    if what == "patch" and not arguments.other:
        raise ConfigError(f"other is {arguments.other!r}: the prompt to patch is needed")
    check_either(arguments)
    model = load_either("inside", arguments)
    asked = {name: value for name, value in flags.items() if value is not None}
    other: str | None = asked.pop("other", None)
    texts: list[str | tuple[str, str]] = [arguments.prompt, *([other] if other else [])]
    if model.kind == "targets":
        say_unknown("inside", model.tokenizers.of_source, [arguments.prompt])
        say_unknown("inside", model.tokenizer, [text for text in (arguments.target, other) if text])
    else:
        given = [text for text in (arguments.prompt, other) if text]
        say_unknown("inside", model.tokenizer, given, model.masks)
    if model.kind == "targets":
        target = arguments.target
        if target is None:
            fits = max(1, getattr(model.config, "max_len", 2 * LENS_TOKENS) // 2)
            count = min(LENS_TOKENS, fits)
            target = model.generate(arguments.prompt, count) if what == "lens" else ""
        texts = [(arguments.prompt, one) for one in (target, *([other] if other else []))]
        print(f"{arguments.prompt} -> {target}")
    elif arguments.target is not None:
        rule = f"{model.instead()}, and has no targets"
        raise ConfigError(f"target is {arguments.target!r}: {rule}")
    seen: Pictured = getattr(model, what)(*texts, **asked)
    if arguments.out.suffix.lower() == ".html":
        arguments.out.write_text(seen.html(), encoding="utf-8")
    else:
        seen.plot().savefig(arguments.out)
    print(seen.summary())
    print(f"drawn: {arguments.out}")


def _parser() -> Parser:
    about = (
        "Look inside a model as it reads a text. lens: what it would write after each block. "
        "patch: which values of the prompt bring its answer into the pass over another. heads: "
        "what changes without each head. attribution: what each token and part adds to the answer."
    )
    parser = Parser("inside", about)
    add = parser.add_argument
    add_model(parser)
    add("--what", choices=tuple(READS), default="lens", help="default: lens")
    add("--prompt", metavar="TEXT", help="the text, or the source of a model of pairs")
    add(
        "--target", metavar="TEXT",
        help="of pairs: the target so far; default: none, and of lens what the model writes",
    )  # fmt: skip
    add(
        "--other", metavar="TEXT",
        help="of patch: the prompt that is patched, of as many tokens; of pairs, the other target",
    )  # fmt: skip
    add("--answer", metavar="TOKEN", help="what is answered; default: the model's likeliest token")
    add(
        "--other-answer", metavar="TOKEN",
        help="whose logit is subtracted; default: none, of patch the likeliest after --other",
    )  # fmt: skip
    add(
        "--baseline", metavar="TOKEN",
        help="of attribution: what stands for no token; default: a mask, padding, <unk>, an end "
        "or a space, the first that the tokenizer has",
    )  # fmt: skip
    add(
        "--out", type=Path, default=Path("inside.png"), metavar="FILE",
        help="the picture, .png, .svg or .pdf, or a page to hover, .html, which replaces a file of "
        "that name; default: inside.png",
    )  # fmt: skip
    return parser
