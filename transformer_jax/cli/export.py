"""Export a decoder as programs that jax runs without this package, with a script that does so.

python -m transformer_jax export --model FOLDER_OR_ID_OR_RUN --to FOLDER
python FOLDER/decode.py "Once upon a time"
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from transformer_jax.cli.command import Parser, run
from transformer_jax.config import ConfigError
from transformer_jax.config.fields import check_new_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 (the model cannot be read) or 2 (usage)."""
    return run(_parser(), argv, lambda arguments: print(*_export(arguments), sep="\n"))


def _export(arguments: argparse.Namespace) -> list[str]:
    """Export, and return what was written, line by line."""
    if arguments.model is None:
        raise ConfigError("model is None: the folder of a model or a run is needed")
    check_new_folder("to", arguments.to)
    from transformer_jax.cli.convert import tokenizer_files
    from transformer_jax.text.export import check_is_decoder, export_decoder
    from transformer_jax.tokenizers.special import frame
    from transformer_jax.use.language_model import load

    found = load(
        arguments.model, checkpoint=arguments.checkpoint, dtype=arguments.dtype,
        weights=arguments.weights,
    ).model  # fmt: skip
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
    add(
        "--model", metavar="FOLDER_OR_ID",
        help="the folder of a run or of a published model, or its id on the Hugging Face hub",
    )  # fmt: skip
    add("--checkpoint", choices=("best", "last"), help="of a run; default: best, if there is one")
    add("--to", required=True, metavar="FOLDER", help="where to write; new, or an earlier export")
    add(
        "--context", type=int, metavar="N",
        help="most tokens of a prompt and its answer; default: the model's, at most 2048",
    )  # fmt: skip
    add("--batch", type=int, metavar="N", help="rows of a batch; default: any number")
    add(
        "--platforms", default="cpu,cuda,tpu", metavar="NAME,...",
        help="of cpu, cuda, rocm and tpu; default: cpu,cuda,tpu",
    )  # fmt: skip
    add(
        "--dtype", choices=("float32", "bfloat16", "float16"),
        help="of a published --model: what its parameters become; default: what they are",
    )  # fmt: skip
    add(
        "--weights", choices=("bf16", "int8", "int4"),
        help="hold the weights in this type; int8 takes a quarter of float32's memory",
    )  # fmt: skip
    return parser
