"""The command that continues a text with a trained run.

python -m transformer_jax.generate --run FOLDER --prompt TEXT
python -m transformer_jax.generate --run FOLDER --prompts FILE --slots 8

An import of `transformer_jax.generate`, in whichever way, gives the function (of decode.py).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformer_jax.config import ConfigError
from transformer_jax.flags import spelled


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0, 1 (the run cannot be read) or 2 (usage)."""
    parser = _parser()
    flags = [option for action in parser._actions for option in action.option_strings]
    try:
        arguments = parser.parse_args(spelled(sys.argv[1:] if argv is None else argv, flags))
    except ConfigError as error:
        parser.error(str(error))
    try:
        _write(arguments)
        return 0
    except BrokenPipeError:  # the reader had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print()
        return 130
    except (ValueError, OSError) as error:
        if arguments.debug:
            raise
        from transformer_jax.checkpoint import CheckpointError

        print(f"generate: {_one_line(error)}", file=sys.stderr)
        return 1 if isinstance(error, CheckpointError | OSError) else 2


def _write(arguments: argparse.Namespace) -> None:
    if not 0 <= arguments.seed < 2**32:
        raise ConfigError(f"seed is {arguments.seed}: must be at least 0 and below 2**32")
    if arguments.tokens is not None and arguments.tokens < 1:
        raise ConfigError(f"tokens is {arguments.tokens}: must be positive")
    _one_way(arguments)
    from pathlib import Path

    import jax

    from transformer_jax import checkpoint, completion
    from transformer_jax.models import init_params
    from transformer_jax.run_folder import RunFolder

    sampler = _sampler(arguments)
    stop = completion.check_stop_strings(arguments.stop or ())
    folder = RunFolder(Path(arguments.run))
    config = folder.read_config()
    steps = checkpoint.saved_steps(folder.checkpoints)
    if not steps:
        raise ConfigError(f"run is {arguments.run!r}: it has no checkpoint yet")
    step = steps[-1]
    if arguments.checkpoint == "best":
        best = checkpoint.best_step(folder.checkpoints)
        if best is None:
            raise ConfigError("checkpoint is 'best': none was evaluated yet; 'last' is there")
        step = best
    path = checkpoint.step_path(folder.checkpoints, step)
    metadata = checkpoint.read_manifest(path).metadata
    tokenizer = folder.read_tokenizer(metadata["tokenizer_sha256"])
    template = jax.eval_shape(lambda: init_params(config.model, jax.random.key(0)))
    params = checkpoint.restore(path, {"params": template})["params"]
    processors = _processors(arguments, tokenizer)
    with contextlib.suppress(AttributeError):  # a replaced stdout may have no such method
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    model = config.model, params, tokenizer
    common: dict[str, Any] = dict(processors=processors, cache_dtype=arguments.cache_dtype)
    drawn = common | dict(sampler=sampler, key=jax.random.key(arguments.seed), stop=stop)

    def tokens_behind(*prompts: str) -> int:
        """As many as asked for: without a wish, as many as fit, up to 400."""
        left = min(completion.room(config.model, tokenizer, prompt) for prompt in prompts)
        if left < 1 or (arguments.tokens or 1) > left:
            fits = f"{max(left, 0)} fit behind the prompt (max_len {config.model.max_len})"
            raise ConfigError(f"tokens is {arguments.tokens or 1}: {fits}")
        return arguments.tokens or min(left, 400)

    prompt = arguments.prompt
    if arguments.prompts is not None:
        prompts = _prompts(arguments.prompts)
        count = tokens_behind(*prompts)
        for number, text in completion.answer(
            *model, prompts, count, slots=arguments.slots, **drawn
        ):
            print(f"--- {number + 1}\n{prompts[number]}{text}", flush=True)
    elif arguments.beams is not None:
        found = completion.search(
            *model, prompt, tokens_behind(prompt), beams=arguments.beams,
            results=arguments.samples or 1, length_penalty=arguments.length_penalty, **common,
        )  # fmt: skip
        for score, text in found:
            print(f"--- score {score:.4f}\n{prompt}{text}")
    elif arguments.samples is not None:
        count = tokens_behind(prompt)
        texts = completion.samples(*model, prompt, count, count=arguments.samples, **drawn)
        for number, text in enumerate(texts):
            print(f"--- {number + 1}\n{prompt}{text}")
    elif arguments.lookup is not None:
        text, out = completion.look_up(
            *model, prompt, tokens_behind(prompt), num_draft=arguments.lookup, **drawn
        )
        print(f"{prompt}{text}")
        print(
            f"{int(out.accepted.sum())} of {int(out.proposed.sum())} proposed tokens accepted, "
            f"{int(out.calls)} calls of the model for {int(out.lengths.sum())} tokens",
            file=sys.stderr,
        )
    else:
        pieces = completion.complete(*model, prompt, arguments.tokens or 400, **drawn)
        sys.stdout.write(prompt)
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")


def _one_way(arguments: argparse.Namespace) -> None:
    """Ways of decoding that exclude each other, and flags that would not be read."""
    ways = [name for name in ("prompts", "beams", "lookup") if getattr(arguments, name) is not None]
    if len(ways) > 1:
        raise ConfigError(f"{ways[0]} and {ways[1]}: give one of them")
    if arguments.samples is not None and ways and ways != ["beams"]:
        raise ConfigError(f"samples and {ways[0]}: give one of them")
    for name, least in (("beams", 1), ("lookup", 1), ("samples", 1), ("slots", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} is {value}: must be at least {least}")
    if arguments.beams is None and arguments.length_penalty:
        raise ConfigError(f"length_penalty is {arguments.length_penalty}: needs beams")
    if arguments.beams is not None:
        for name in ("top_k", "top_p", "min_p", "typical_p", "stop"):
            if getattr(arguments, name) is not None:
                raise ConfigError(f"{name} with beams: a beam search draws nothing and never stops")
    if arguments.prompts is not None and arguments.prompt:
        raise ConfigError("prompt and prompts: give one of them")


def _prompts(path: str) -> list[str]:
    """Every line of a file that is not empty; - is standard input."""
    if path == "-":
        lines = sys.stdin.read().splitlines()
    else:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    prompts = [line for line in lines if line]
    if not prompts:
        raise ConfigError(f"prompts is {path!r}: it has no line with text")
    return prompts


def _processors(arguments: argparse.Namespace, tokenizer: Any) -> tuple[Any, ...]:
    from transformer_jax import processors as kinds

    out: list[Any] = []
    for name, kind in (
        ("repetition_penalty", kinds.RepetitionPenalty),
        ("presence_penalty", kinds.PresencePenalty),
        ("frequency_penalty", kinds.FrequencyPenalty),
        ("no_repeat_ngram", kinds.NoRepeatNGram),
    ):
        value = getattr(arguments, name)
        if value is not None:
            out.append(_valued(name, value, kind))
    for name, listed in (("ban", kinds.Ban), ("force", kinds.Force)):
        text = getattr(arguments, name)
        if text is not None:
            ids = tokenizer.encode(text).tolist() if text else []
            out.append(_valued(name, text, partial(_of_ids, listed, ids)))
    return tuple(out)


def _of_ids(kind: Callable[..., Any], ids: list[int], text: str) -> Any:
    return kind(*ids)


def _valued(name: str, value: Any, kind: Callable[[Any], Any]) -> Any:
    """A value made of a flag's; an error names the flag."""
    try:
        return kind(value)
    except ValueError as error:
        rule = str(error).partition(": ")[2] or str(error)
        raise ConfigError(f"{name} is {value!r}: {rule}") from None


def _sampler(arguments: argparse.Namespace):
    from transformer_jax.sampling import MinP, Sample, Temperature, TopK, TopP, Typical

    return Sample(
        *(
            _valued(name, getattr(arguments, name), kind)
            for name, kind in (
                ("temperature", Temperature),
                ("top_k", TopK),
                ("top_p", TopP),
                ("min_p", MinP),
                ("typical_p", Typical),
            )
            if getattr(arguments, name) is not None
        )
    )


def _parser() -> argparse.ArgumentParser:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str):
            self.exit(2, f"generate: {message}\n")

    parser = Parser(
        prog="python -m transformer_jax.generate",
        description="Continue a text with a model that train.py trained.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--run", required=True, metavar="FOLDER", help="the run folder that train.py wrote")
    add("--prompt", default="", metavar="TEXT", help="the text to continue; default: a new line")
    add("--tokens", type=int, metavar="N", help="how many tokens; default: 400, or what fits")
    add(
        "--temperature", type=float, default=0.8, metavar="T",
        help="below 1 sharpens the distribution, 0 takes the likeliest token; default: 0.8",
    )  # fmt: skip
    add("--top-k", type=int, metavar="K", help="draw among the K likeliest tokens")
    add("--top-p", type=float, metavar="P", help="draw among the likeliest that hold mass P")
    add("--min-p", type=float, metavar="P", help="draw among those at least P times the likeliest")
    add("--typical-p", type=float, metavar="P", help="draw among the most typical with mass P")
    add("--repetition-penalty", type=float, metavar="P", help="above 1: what was said is unlikely")
    add("--presence-penalty", type=float, metavar="A", help="taken off what was written")
    add("--frequency-penalty", type=float, metavar="A", help="taken off, times its count")
    add("--no-repeat-ngram", type=int, metavar="N", help="never the same N tokens twice")
    add("--ban", metavar="TEXT", help="never a token of this text")
    add("--force", metavar="TEXT", help="begin with this text")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    add("--samples", type=int, metavar="N", help="N texts; the prompt is read once")
    add("--beams", type=int, metavar="N", help="search with N beams; --samples of them are shown")
    add(
        "--length-penalty", type=float, default=0.0, metavar="A",
        help="of a beam search: log p is divided by length^A; default: 0",
    )  # fmt: skip
    add("--lookup", type=int, metavar="N", help="propose N tokens at a time from the text so far")
    add("--prompts", metavar="FILE", help="continue every line of a file, or of - standard input")
    add(
        "--slots", type=int, default=8, metavar="N", help="--prompts that run at a time; default: 8"
    )
    add(
        "--cache-dtype", choices=("float32", "bfloat16", "int8"),
        help="of keys and values; default: the model's; int8 takes a quarter of float32",
    )  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="all randomness follows from it")
    add(
        "--checkpoint", choices=("best", "last"), default="best",
        help="the lowest held-out loss (default), or the last step",
    )  # fmt: skip
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())

if __name__ == "transformer_jax.generate":  # imported, which binds the name to what stands here
    from transformer_jax.decode import generate

    sys.modules[__name__] = generate  # type: ignore[assignment]
