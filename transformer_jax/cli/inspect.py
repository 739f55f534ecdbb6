"""Show what happens inside a model as it reads text, as a picture or an interactive HTML page.

python -m transformer_jax inspect --model RUN --prompt TEXT --what lens --out lens.html
python -m transformer_jax inspect --model FOLDER_OR_ID --prompt TEXT --other TEXT --what patch
python -m transformer_jax inspect --model RUN --prompt TEXT --what attention --layer 5 --head 1

The values of --what are attention (the attention weights of every layer and head), lens (the
predictions after each block), patch (the values of the prompt that transfer its answer to another
prompt), heads (the effect of removing each head), and attribution (the contribution of each token
and each part of the model to the answer).
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
    report_unknown,
    run,
)
from transformer_jax.config import ConfigError

if TYPE_CHECKING:
    from transformer_jax.text.tables import TableResult


@dataclass(frozen=True, kw_only=True)
class Inspect(ModelOptions):
    """Command-line options."""

    prompt: str
    """The text or, for an encoder-decoder, the source."""
    what: Literal["attention", "lens", "patch", "heads", "attribution"] = "lens"
    """What to show."""
    target: str | None = None
    """For pairs: the target so far; default: empty or, for attention and lens, the model's
    output."""
    other: str | None = None
    """For patch: the prompt to patch, with the same number of tokens, or another target for
    pairs."""
    answer: str | None = None
    """The answer, which is a single token; default: the likeliest token."""
    other_answer: str | None = None
    """Token whose logit is subtracted; default: none or, for patch, the likeliest token after
    --other."""
    baseline: str | None = None
    """For attribution: a neutral token; default: the first of mask, padding, <unk>, end and space
    that the tokenizer has."""
    part: Literal["self", "cross", "encoder"] | None = None
    """For attention in an encoder-decoder: one kind of attention; default: all kinds."""
    layer: int | None = None
    """For attention: zero-based index of a layer; default: all layers."""
    head: int | None = None
    """For attention: zero-based index of a head; default: all heads."""
    out: Path = Path("inspect.png")
    """Output file, which replaces an existing file: a picture (.png, .svg or .pdf) or, except for
    attention, an interactive page (.html)."""


READS = {
    "attention": ("part", "layer", "head"), "lens": (),
    "patch": ("other", "answer", "other_answer"), "heads": ("answer", "other_answer"),
    "attribution": ("answer", "other_answer", "baseline"),
}  # fmt: skip
"""Values of --what, and the options that apply to each of them in addition to the prompt."""

LENS_TOKENS = 40
"""Maximum length of a target that the model generates for the lens, unless half of max_len is less.
Text that is encoded again may have more tokens than were generated."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run(Inspect, argv, inspect)


def inspect(options: Inspect) -> None:
    """Draw the picture or write the page, and print a summary."""
    what, prompt, out = options.what, options.prompt, options.out
    check_picture(out, PICTURES if what == "attention" else (*PICTURES, ".html"))
    if not prompt:
        raise ConfigError(f"prompt is {prompt!r}: must not be empty")
    refuse_unread(options, READS, what, "needs what to be")
    if what == "patch" and not options.other:
        raise ConfigError(f"other is {options.other!r}: must be the prompt to patch")
    # Use float32, because bfloat16 rounding would be visible when tokens and heads are compared.
    model = options.load_float32()
    others = [options.other] if options.other else []
    texts: list[str | tuple[str, str]] = [prompt, *others]
    if model.kind == "targets":
        target = options.target
        report_unknown("inspect", model.tokenizers.of_source, [prompt])
        report_unknown("inspect", model.tokenizer, [*([target] if target else []), *others])
        # A translation attends to its own target, so generate the target first.
        if target is None and what == "attention":
            target = model.generate(prompt)
        elif target is None and what == "lens":
            fits = max(1, getattr(model.config, "max_len", 2 * LENS_TOKENS) // 2)
            target = model.generate(prompt, min(LENS_TOKENS, fits))
        texts = [(prompt, one) for one in (target or "", *others)]
        print(f"{prompt} -> {target or ''}")
    else:
        report_unknown("inspect", model.tokenizers.of_source, [prompt, *others], model.masks)
        if options.target is not None:
            raise ConfigError(f"target is {options.target!r}: {model.instead()}, without targets")
    if what == "attention":
        weights = model.inspect.attention(texts[0])
        weights.plot(part=options.part, layer=options.layer, head=options.head).savefig(out)
    else:
        settings = {name: getattr(options, name) for name in READS[what] if name != "other"}
        result: TableResult = getattr(model.inspect, what)(*texts, **settings)
        if out.suffix.lower() == ".html":
            out.write_text(result.html(), encoding="utf-8")
        else:
            result.plot().savefig(out)
        print(result.summary())
    print(f"drawn: {out}")
