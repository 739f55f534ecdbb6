"""Export a decoder as programs that jax runs without this package, with a script that does so.

python -m transformer_jax export --model FOLDER_OR_ID_OR_RUN --to FOLDER
python FOLDER/decode.py "Once upon a time"
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from transformer_jax.cli.command import Parser, load_named, run
from transformer_jax.config import ConfigError
from transformer_jax.config.fields import check_new_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 (the model cannot be read) or 2 (usage)."""
    return run(_parser(), argv, lambda arguments: print(*_export(arguments), sep="\n"))


def _export(arguments: argparse.Namespace) -> list[str]:
    """Export, and return what was written, line by line."""
    check_new_folder("to", arguments.to)
    from transformer_jax.cli.convert import tokenizer_files
    from transformer_jax.text.export import check_is_decoder, export_decoder
    from transformer_jax.tokenizers.special import frame

    found = load_named(arguments).model
    check_is_decoder(found.config)
    if found.processors:
        rule = "decode.py takes the likeliest of all; export_decoder exports the programs alone"
        raise ConfigError(f"the model was published with tokens that it never writes: {rule}")
    files, lines = dict[str, bytes](), list[str]()
    try:
        definition = tokenizer_files(found.tokenizer, found.config.vocab_size)[0]
        files["tokenizer.json"] = definition["tokenizer.json"]
        prompt = "a text"
    except ConfigError as error:
        lines, prompt = [f"no tokenizer.json, decode.py takes token ids: {error}"], "1,2,3"
    first = frame(found.tokenizer).first if found.begin_id is None else (found.begin_id,)
    export_decoder(
        arguments.to, found.config, found.params, context=arguments.context,
        batch=arguments.batch, platforms=arguments.platforms.split(","), first=first,
        stop=found.stop_ids, files=files,
    )  # fmt: skip
    return [*lines, f"{arguments.to}: written; python {arguments.to}/decode.py {prompt!r} decodes"]


def _parser() -> Parser:
    about = "Export a decoder as programs of jax.export, which run where this package is not."
    parser = Parser("export", about)
    add = parser.add_argument
    parser.add_loaded()
    add("--to", required=True, metavar="FOLDER", help="where to write; new, or an earlier export")
    add("--batch", type=int, metavar="N", help="rows of a batch; default: any number")
    add(
        "--platforms", default="cpu,cuda,tpu", metavar="NAME,...",
        help="of cpu, cuda, rocm and tpu; default: cpu,cuda,tpu",
    )  # fmt: skip
    return parser
