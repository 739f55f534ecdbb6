"""Look inside a model as it reads a text: a picture, or a page that can be hovered.

python -m transformer_jax inspect --model RUN --prompt TEXT --what lens --out lens.html
python -m transformer_jax inspect --model FOLDER_OR_ID --prompt TEXT --other TEXT --what patch
python -m transformer_jax inspect --model RUN --prompt TEXT --what attention --layer 5 --head 1

attention: what each token looks at, in every layer and head. lens: what the model would write after
each block. patch: which values of the prompt bring its answer into the pass over another. heads:
what changes without each head. attribution: what each token and part adds to the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from transformer_jax.cli.command import (
    PICTURES,
    ModelOptions,
    check_picture,
    refuse_unread,
    run,
    say_unknown,
)
from transformer_jax.config import ConfigError

if TYPE_CHECKING:
    from transformer_jax.text.tables import Pictured


@dataclass(frozen=True, kw_only=True)
class Inspect(ModelOptions):
    """Options of the command."""

    prompt: str
    """The text, or the source of a model of pairs."""
    what: Literal["attention", "lens", "patch", "heads", "attribution"] = "lens"
    """What is shown."""
    target: str | None = None
    """Of pairs: the target so far; default: none, or of attention and lens what the model writes.
    """
    other: str | None = None
    """Of patch: the prompt that is patched, of as many tokens; of pairs, the other target."""
    answer: str | None = None
    """The token that is answered; default: the model's likeliest."""
    other_answer: str | None = None
    """The token whose logit is subtracted; default: none, of patch the likeliest after --other."""
    baseline: str | None = None
    """Of attribution: the token that means nothing; default: a mask, padding, <unk>, an end or a
    space, the first that the tokenizer has."""
    part: Literal["self", "cross", "encoder"] | None = None
    """Of attention of an encoder-decoder: one kind of it; default: all."""
    layer: int | None = None
    """Of attention: one layer, from 0 on; default: all."""
    head: int | None = None
    """Of attention: one head, from 0 on; default: all."""
    out: Path = Path("inspect.png")
    """The picture, .png, .svg or .pdf, or, but for attention, a page to hover, .html; a file of
    that name is replaced."""


READS = {
    "attention": ("part", "layer", "head"), "lens": (),
    "patch": ("other", "answer", "other_answer"), "heads": ("answer", "other_answer"),
    "attribution": ("answer", "other_answer", "baseline"),
}  # fmt: skip
"""The values of --what, with the options that each reads besides the prompt."""

LENS_TOKENS = 40
"""Most tokens of a target that the model writes for the lens, or half of its max_len if that is
fewer: a text that is read again may have more tokens than were written."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 (the model cannot be read) or 2 (usage)."""
    return run(Inspect, argv, inspect)


def inspect(options: Inspect) -> None:
    """Draw what is inside the model, and print a summary."""
    what, prompt, out = options.what, options.prompt, options.out
    check_picture(out, PICTURES if what == "attention" else (*PICTURES, ".html"))
    if not prompt:
        raise ConfigError(f"prompt is {prompt!r}: the text to look at is needed")
    refuse_unread(options, READS, what, "needs what to be")
    if what == "patch" and not options.other:
        raise ConfigError(f"other is {options.other!r}: the prompt to patch is needed")
    # Numbers are compared across tokens and heads: rounding to bfloat16 would show.
    model = options.load_float32()
    others = [options.other] if options.other else []
    texts: list[str | tuple[str, str]] = [prompt, *others]
    if model.kind == "targets":
        target = options.target
        say_unknown("inspect", model.tokenizers.of_source, [prompt])
        say_unknown("inspect", model.tokenizer, [*([target] if target else []), *others])
        # The attention of a translation is that over its own target, so one is written first.
        if target is None and what == "attention":
            target = model.generate(prompt)
        elif target is None and what == "lens":
            fits = max(1, getattr(model.config, "max_len", 2 * LENS_TOKENS) // 2)
            target = model.generate(prompt, min(LENS_TOKENS, fits))
        texts = [(prompt, one) for one in (target or "", *others)]
        print(f"{prompt} -> {target or ''}")
    else:
        say_unknown("inspect", model.tokenizers.of_source, [prompt, *others], model.masks)
        if options.target is not None:
            rule = f"{model.instead()}, and has no targets"
            raise ConfigError(f"target is {options.target!r}: {rule}")
    if what == "attention":
        weights = model.inspect.attention(texts[0])
        weights.plot(part=options.part, layer=options.layer, head=options.head).savefig(out)
    else:
        given = {name: getattr(options, name) for name in READS[what] if name != "other"}
        seen: Pictured = getattr(model.inspect, what)(*texts, **given)
        if out.suffix.lower() == ".html":
            out.write_text(seen.html(), encoding="utf-8")
        else:
            seen.plot().savefig(out)
        print(seen.summary())
    print(f"drawn: {out}")
