"""Export a decoder as programs that run without this package, with a script to run them.

python -m transformer_jax export --model FOLDER_OR_ID_OR_RUN --to FOLDER
python FOLDER/decode.py "Once upon a time"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformer_jax.cli.command import TypedModelOptions, run
from transformer_jax.config import ConfigError
from transformer_jax.config.fields import check_new_folder


@dataclass(frozen=True, kw_only=True)
class Export(TypedModelOptions):
    """Command-line options."""

    context: int | None = None
    """Maximum number of tokens in a prompt and its answer, not counting the last token, which is
    never read; default: the model's maximum, up to 2048."""
    to: str
    """Output folder, which must be new or an earlier export."""
    batch: int | None = None
    """Number of rows per batch; default: any number."""
    platforms: str = "cpu,cuda,tpu"
    """Comma-separated list of cpu, cuda, rocm and tpu."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run(Export, argv, lambda options: print(*export(options), sep="\n"))


def export(options: Export) -> list[str]:
    """Export the model and return lines that describe the result."""
    check_new_folder("to", options.to)
    from transformer_jax.text.export import check_is_decoder, export_decoder
    from transformer_jax.text.save import tokenizer_files
    from transformer_jax.tokenizers.special import frame

    found = options.load(dtype=options.dtype, weights=options.weights).model
    check_is_decoder(found.config)
    if found.processors:
        rule = "decode.py cannot exclude them; use export_decoder to export only the programs"
        raise ConfigError(f"the model's generation config excludes tokens, but {rule}")
    files, lines = dict[str, bytes](), list[str]()
    try:
        definition = tokenizer_files(found.tokenizer, found.config.vocab_size)[0]
        files["tokenizer.json"] = definition["tokenizer.json"]
        prompt = "a text"
    except ConfigError as error:
        lines, prompt = (
            [f"tokenizer.json was not written, so decode.py takes token IDs: {error}"],
            "1,2,3",
        )
    first = frame(found.tokenizer).first if found.begin_id is None else (found.begin_id,)
    export_decoder(
        options.to, found.config, found.params, context=options.context,
        batch=options.batch, platforms=options.platforms.split(","), first=first,
        stop=found.stop_ids, files=files,
    )  # fmt: skip
    return [*lines, f"{options.to}: written; to decode: python {options.to}/decode.py {prompt!r}"]
