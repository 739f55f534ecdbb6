"""Continue a text with a trained run or a published model, from the command line.

python -m transformer_jax generate --run FOLDER --prompt TEXT
python -m transformer_jax generate --run FOLDER --prompts FILE --slots 8
python -m transformer_jax generate --model FOLDER_OR_ID --prompt TEXT --chat
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from transformer_jax.cli.command import Parser, add_run, load_run, run
from transformer_jax.config import ConfigError, Learned, ModelConfig, TrainConfig
from transformer_jax.config.architectures import AnyModelConfig, model_shape
from transformer_jax.config.fields import FieldValue
from transformer_jax.config.tasks import (
    ChatTask,
    ClassifyTask,
    ContinuousTask,
    DigitsTask,
    LanguageTask,
    MaskedTask,
    PreferenceTask,
    Task,
    TonesTask,
)

if TYPE_CHECKING:
    import numpy as np

    from transformer_jax.decoding.logit_processors import HistoryProcessor
    from transformer_jax.decoding.samplers import Processor, Sample
    from transformer_jax.pytree import Params
    from transformer_jax.text.text_model import TextModel
    from transformer_jax.tokenizers.trained import Tokenizer
    from transformer_jax.training.tasks.task import Tokenizers

T = TypeVar("T")

Options: TypeAlias = dict[str, Any]
"""Arguments by name, of functions that take them alike: each has types of its own for them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 (the run cannot be read) or 2 (usage)."""
    return run(_parser(), argv, _write)


def _write(arguments: argparse.Namespace) -> None:
    if arguments.seed is not None and not 0 <= arguments.seed < 2**32:
        raise ConfigError(f"seed is {arguments.seed}: must be at least 0 and below 2**32")
    if arguments.tokens is not None and arguments.tokens < 1:
        raise ConfigError(f"tokens is {arguments.tokens}: must be positive")
    _one_way(arguments)
    from transformer_jax.text import completion, text_model

    sampler = _sampler(arguments)
    stop = completion.check_stop_strings(arguments.stop or ())
    if arguments.run is not None:
        model = load_run("generate", arguments)
    else:
        given = arguments.dtype, arguments.max_len
        model = text_model.load_text_model(arguments.model, dtype=given[0], max_len=given[1])
    if arguments.weights is not None:
        model = text_model.with_weights_held(model, arguments.weights)
    if model.run is not None and not isinstance(model.run.task, LanguageTask):
        _answer(arguments, model, model.run)
        return
    processors = (*model.processors, *_processors(arguments, model))
    if model_shape(model.config) == "encoder-decoder":
        _translate(arguments, model, sampler, processors, stop)
    else:
        _continue(arguments, model, sampler, processors, stop)


def _answered_by(task: Task) -> tuple[str, ...]:
    """Return the flags that a run of another task than `language` reads."""
    common = "prompt", "prompts", "checkpoint"
    match task:
        case MaskedTask() | ClassifyTask():
            return common
        case ChatTask() | PreferenceTask():
            return (*common, "tokens", "seed")
        case DigitsTask() | TonesTask():
            return "prompts", "checkpoint"
    return (*common, "beams", "tokens")


def _answer(arguments: argparse.Namespace, model: TextModel, run: TrainConfig) -> None:
    """Do with each prompt what a run was trained for: translate, fill masks, label, answer."""
    from transformer_jax.training.tasks.prompts import answer_prompts
    from transformer_jax.training.tasks.task import Tokenizers

    flags = _answered_by(run.task)
    for name, value in vars(arguments).items():
        if name not in ("run", "init_from", "debug", *flags) and value not in (None, False):
            rule = f"a run of task {run.task.kind!r} reads {', '.join(flags)}"
            raise ConfigError(f"{name} is {value!r}: {rule}")
    tokenizers = Tokenizers(model.tokenizer, model.source_tokenizer)
    if isinstance(run.task, ContinuousTask):
        _hear_or_see(arguments, run, tokenizers, model.params)
        return
    if arguments.prompts is not None:
        texts = _prompts(arguments.prompts, every_line=True)
    elif arguments.prompt:
        texts = [arguments.prompt]
    else:
        raise ConfigError(f"prompt is '': a run of task {run.task.kind!r} needs one, or prompts")
    masks = ("[MASK]", "_") if isinstance(run.task, MaskedTask) else ()
    _say_unknown(tokenizers.of_source, texts, masks)
    if arguments.seed is not None:
        run = dataclasses.replace(run, seed=arguments.seed)
    for text in answer_prompts(
        run, tokenizers, model.params, texts, beams=arguments.beams, num_tokens=arguments.tokens
    ):
        print(text.replace("\n", "\\n") if arguments.prompts else text, flush=True)


def _say_unknown(tokenizer: Tokenizer, texts: Sequence[str], masks: Sequence[str] = ()) -> None:
    """Say in a line which words of the texts, but for masks, have no token of their own."""
    from transformer_jax.tokenizers.special import plain
    from transformer_jax.tokenizers.trained import WordTokenizer

    words = plain(tokenizer)
    text = " ".join(texts)
    for mask in masks:
        text = text.replace(mask, " ")
    if isinstance(words, WordTokenizer) and (unknown := words.unknown(text)):
        named = ", ".join(map(repr, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
        rule = "not among the words of the training text, read as <unk>"
        print(f"generate: unknown words: {len(unknown)} ({named}): {rule}", file=sys.stderr)


def _hear_or_see(
    arguments: argparse.Namespace, run: TrainConfig, tokenizers: Tokenizers, params: Params
) -> None:
    """Print a line for each picture or sound of a file."""
    from transformer_jax.training.tasks.continuous import answer_signals
    from transformer_jax.training.tasks.signals import read_signals

    if arguments.prompts is None:
        rule = f"a run of task {run.task.kind!r} reads numbers: give a .npz file"
        raise ConfigError(f"prompts is None: {rule}")
    assert isinstance(run.task, DigitsTask | TonesTask)
    signals = read_signals(run.task, arguments.prompts, targets=False)
    print("\n".join(answer_signals(run, tokenizers, params, signals)))


def _continue(
    arguments: argparse.Namespace,
    given: TextModel,
    sampler: Sample,
    processors: Sequence[HistoryProcessor],
    stop: Sequence[str],
) -> None:
    """Write with a decoder: one text as it comes, or whole texts."""
    if arguments.prompts is not None and arguments.beams is not None:
        raise ConfigError("prompts and beams: give one of them")
    import jax

    from transformer_jax.text import completion

    texts = [arguments.prompt or ""]
    if arguments.prompts is not None:
        texts = _prompts(arguments.prompts)
    read = (
        given.chat
        if arguments.chat
        else partial(completion.read_prompt, given.tokenizer, begin=given.begin_id)
    )
    _say_unknown(given.tokenizer, texts)
    prompts = [_checked_ids(given.config, read(text)) for text in texts]
    shown = ["" if arguments.chat else text for text in texts]
    config = given.config
    if arguments.max_len is None:
        config = _shortened(config, max(map(len, prompts)) + (arguments.tokens or 400))
    model = config, given.params, given.tokenizer
    left = min(completion.room(config, given.tokenizer, prompt) for prompt in prompts)
    common: Options = dict(
        processors=processors, cache_dtype=arguments.cache_dtype, stop_ids=given.stop_ids
    )
    drawn = common | dict(sampler=sampler, key=jax.random.key(arguments.seed or 0), stop=stop)
    ways = arguments.prompts, arguments.beams, arguments.samples, arguments.lookup
    if any(way is not None for way in ways):
        count = _fitting(arguments.tokens, left, config)
        _print_texts(arguments, model, prompts, shown, count, common, drawn)
        return
    if left < 1 and arguments.chat:
        _fitting(arguments.tokens, left, config)  # a longer text is cut, and is then no message
    pieces = completion.complete(*model, prompts[0], arguments.tokens or 400, **drawn)
    sys.stdout.write(shown[0])
    for number, piece in enumerate(pieces):
        sys.stdout.write(_begun(arguments, piece) if number == 0 else piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _fitting(tokens: int | None, left: int, config: AnyModelConfig) -> int:
    """Return how many tokens to write: those asked for, else as many as fit, up to 400."""
    from transformer_jax.text import completion

    if left < 1 or (tokens or 1) > left:
        fits = f"{max(left, 0)} fit after the prompt (max_len {completion.longest_text(config)})"
        raise ConfigError(f"tokens is {tokens or 1}: {fits}")
    return tokens or min(left, 400)


def _print_texts(
    arguments: argparse.Namespace,
    model: tuple[FieldValue, Params, Tokenizer],
    prompts: Sequence[np.ndarray],
    shown: Sequence[str],
    count: int,
    common: Options,
    drawn: Options,
) -> None:
    """Print whole texts: of many prompts, of beams, of samples, or of a prompt looked up."""
    from transformer_jax.text import completion

    prompt, before = prompts[0], shown[0]
    if arguments.prompts is not None:
        for number, text in completion.answer(
            *model, prompts, count, slots=arguments.slots or 8, **drawn
        ):
            print(f"--- {number + 1}\n{shown[number]}{_begun(arguments, text)}", flush=True)
    elif arguments.beams is not None:
        found = completion.search(
            *model, prompt, count, beams=arguments.beams, results=arguments.samples or 1,
            length_penalty=arguments.length_penalty or 0.0, **common,
        )  # fmt: skip
        for score, text in found:
            print(f"--- score {score:.4f}\n{before}{_begun(arguments, text)}")
    elif arguments.samples is not None:
        texts = completion.samples(*model, prompt, count, count=arguments.samples, **drawn)
        for number, text in enumerate(texts):
            print(f"--- {number + 1}\n{before}{_begun(arguments, text)}")
    else:
        text, out = completion.look_up(*model, prompt, count, num_draft=arguments.lookup, **drawn)
        print(f"{before}{_begun(arguments, text)}")
        print(
            f"{int(out.accepted.sum())} of {int(out.proposed.sum())} proposed tokens accepted, "
            f"{int(out.calls)} calls of the model for {int(out.lengths.sum())} tokens",
            file=sys.stderr,
        )


def _translate(
    arguments: argparse.Namespace,
    model: TextModel,
    sampler: Sample,
    processors: Sequence[HistoryProcessor],
    stop: Sequence[str],
) -> None:
    """Write with an encoder-decoder, to which a prompt is the source."""
    import jax

    from transformer_jax.decoding.logit_processors import Force, ForceLast
    from transformer_jax.text.translation import search_translations, translate

    for name in ("lookup", "chat", "slots"):
        if getattr(arguments, name):
            raise ConfigError(f"{name}: needs a decoder, {arguments.model} is an encoder-decoder")
    config = model.config
    assert isinstance(config, ModelConfig)  # a run's was answered before
    count = arguments.tokens or min(400, config.max_len)
    if config.positions is not None and config.positions.absolute and count > config.max_len:
        raise ConfigError(f"tokens is {count}: {config.max_len} fit (max_len)")
    if model.forced_bos_id is not None:
        processors = (*processors, Force(model.forced_bos_id))  # also where it is banned
    if model.forced_eos_id is not None:
        processors = (*processors, ForceLast(count, model.forced_eos_id))
    common: Options = dict(
        start=model.start_id, processors=processors, stop_ids=model.stop_ids,
        cache_dtype=arguments.cache_dtype,
    )  # fmt: skip
    texts = [arguments.prompt or ""]
    if arguments.prompts is not None:
        texts = _prompts(arguments.prompts)
    for number, text in enumerate(texts):
        tokenizer: Any = model.tokenizer  # a published one: no run trains an encoder-decoder
        source = tokenizer.encode(text, special_tokens=True)
        if not len(source):
            raise ConfigError("prompt is '': an encoder-decoder needs a source")
        known = config, model.params, model.tokenizer, source, count
        if arguments.beams is not None:
            found = search_translations(
                *known, beams=arguments.beams, results=arguments.samples or 1,
                length_penalty=arguments.length_penalty or 0.0, **common,
            )  # fmt: skip
            for score, target in found:
                print(f"--- score {score:.4f}\n{target}", flush=True)
            continue
        key = jax.random.key(arguments.seed or 0)
        key = key if arguments.prompts is None else jax.random.fold_in(key, number)
        targets = translate(
            *known, sampler=sampler, key=key, count=arguments.samples or 1, stop=stop, **common
        )
        for n, target in enumerate(targets):
            many = arguments.samples is not None or arguments.prompts is not None
            print(f"--- {number + n + 1}\n{target}" if many else target, flush=True)


def _begun(arguments: argparse.Namespace, text: str) -> str:
    """Return an answer without the space that a first word may bring; other texts as they are."""
    return text.removeprefix(" ") if arguments.chat else text


def _checked_ids(config: AnyModelConfig, ids: np.ndarray) -> np.ndarray:  # i32[P]
    """Return the ids of a prompt; DataError for one that the model does not have."""
    from transformer_jax.training.data import DataError

    known = config.encoder_vocab_size if isinstance(config, ModelConfig) else config.vocab_size
    if len(ids) and ids.max() >= known:
        rule = f"the model has {known} tokens"
        raise DataError(f"the prompt has id {ids.max()}: {rule}")
    return ids


def _shortened(config: AnyModelConfig, needed: int) -> AnyModelConfig:
    """Return a config with room for so many tokens, whose cache is no larger than it has to be."""
    if not isinstance(config, ModelConfig) or isinstance(config.positions, Learned):
        return config
    return dataclasses.replace(config, max_len=min(config.max_len, -(-needed // 64) * 64))


def _one_way(arguments: argparse.Namespace) -> None:
    """Refuse ways of decoding that exclude each other, and flags that would not be read."""
    if (arguments.run is None) == (arguments.model is None):
        raise ConfigError("run and model: give one of them")
    if arguments.run is not None:
        unread = [name for name in ("dtype", "max_len") if getattr(arguments, name) is not None]
        if unread:
            raise ConfigError(f"{unread[0]} with run: a run has its own, it needs model")
    for name in ("checkpoint", "init_from"):
        if arguments.run is None and getattr(arguments, name) is not None:
            raise ConfigError(f"{name} with model: needs run")
    ways = [name for name in ("prompts", "beams", "lookup") if getattr(arguments, name) is not None]
    of_pairs = arguments.run is not None and ways == ["prompts", "beams"]
    if len(ways) > 1 and not of_pairs:
        raise ConfigError(f"{ways[0]} and {ways[1]}: give one of them")
    if arguments.samples is not None and ways and ways != ["beams"]:
        raise ConfigError(f"samples and {ways[0]}: give one of them")
    for name in ("beams", "lookup", "samples", "slots"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}: must be at least 1")
    if arguments.beams is not None and (arguments.samples or 1) > arguments.beams:
        raise ConfigError(
            f"samples is {arguments.samples}: must be at most beams, {arguments.beams}"
        )
    if arguments.beams is None and arguments.length_penalty is not None:
        raise ConfigError(f"length_penalty is {arguments.length_penalty}: needs beams")
    if arguments.prompts is None and arguments.slots is not None:
        raise ConfigError(f"slots is {arguments.slots}: needs prompts")
    if arguments.beams is not None:
        for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "stop", "seed"):
            if getattr(arguments, name) is not None:
                rule = "a beam search draws nothing and stops at no text"
                raise ConfigError(f"{name} with beams: {rule}")
    if arguments.prompts is not None and arguments.prompt is not None:
        raise ConfigError("prompt and prompts: give one of them")
    if arguments.chat and arguments.prompts is None and not arguments.prompt:
        raise ConfigError("chat: needs a prompt, the message")


def _prompts(path: str, every_line: bool = False) -> list[str]:
    """Return every line of a file that is not blank; `-` is standard input.

    With `every_line`, a blank one is a ConfigError: an answer a line is written.
    """
    from transformer_jax.tokenizers.plain_text import split_lines
    from transformer_jax.training.data import Source

    if path == "-":
        source = Source("standard input", sys.stdin.buffer.read())
    else:
        source = Source(path, Path(path).read_bytes())
    found = split_lines(source.text())
    prompts = [line for line in found if line.strip()]
    if every_line and len(prompts) < len(found):
        number = next(n for n, line in enumerate(found, start=1) if not line.strip())
        raise ConfigError(
            f"prompts is {path!r}: line {number} is empty, and every line is answered"
        )
    if not prompts:
        raise ConfigError(f"prompts is {path!r}: it has no line with text")
    return prompts


def _processors(arguments: argparse.Namespace, model: TextModel) -> tuple[HistoryProcessor, ...]:
    """Return what the flags ask of the logits before a token is drawn."""
    from transformer_jax.decoding import logit_processors as kinds

    out: list[HistoryProcessor] = []
    numbered: dict[str, Callable[[FieldValue], HistoryProcessor]] = dict(
        repetition_penalty=kinds.RepetitionPenalty, presence_penalty=kinds.PresencePenalty,
        frequency_penalty=kinds.FrequencyPenalty, no_repeat_ngram=kinds.NoRepeatNGram,
    )  # fmt: skip
    for name, kind in numbered.items():
        value = getattr(arguments, name)
        if value is not None:
            out.append(_valued(name, value, kind))
    listed: dict[str, Callable[..., HistoryProcessor]] = dict(ban=kinds.Ban, force=kinds.Force)
    for name, of_ids in listed.items():
        text = getattr(arguments, name)
        if text is not None:
            ids = model.tokenizer.encode(text).tolist() if text else []
            if ids and max(ids) >= (known := model.config.vocab_size):
                rule = f"has id {max(ids)}: the model has {known} tokens"
                raise ConfigError(f"{name} is {text!r}: {rule}")
            out.append(_valued(name, text, partial(_of_ids, of_ids, ids)))
    return tuple(out)


def _of_ids(
    kind: Callable[..., HistoryProcessor], ids: list[int], text: FieldValue
) -> HistoryProcessor:
    return kind(*ids)


def _valued(name: str, value: FieldValue, kind: Callable[[FieldValue], T]) -> T:
    """Return a value made of a flag's; ConfigError names the flag."""
    try:
        return kind(value)
    except ValueError as error:
        rule = str(error).partition(": ")[2] or str(error)
        raise ConfigError(f"{name} is {value!r}: {rule}") from None


def _sampler(arguments: argparse.Namespace) -> Sample:
    """Return how the flags draw a token."""
    from transformer_jax.decoding.samplers import MinP, Sample, Temperature, TopK, TopP, Typical

    kinds: dict[str, Callable[[FieldValue], Processor]] = dict(
        temperature=Temperature, top_k=TopK, top_p=TopP, min_p=MinP, typical_p=Typical
    )
    given = {name: getattr(arguments, name) for name in kinds}
    if given["temperature"] is None:
        given["temperature"] = 0.8
    named = {name: value for name, value in given.items() if value is not None}
    return Sample(*(_valued(name, value, kinds[name]) for name, value in named.items()))


def _parser() -> Parser:
    description = "Continue a text with a model that train.py trained, or a published one."
    parser = Parser("generate", description)
    add = parser.add_argument
    add_run(parser)
    add(
        "--model", metavar="FOLDER_OR_ID",
        help="a published model instead: a folder of config.json, safetensors and its tokenizer",
    )  # fmt: skip
    add(
        "--prompt", metavar="TEXT",
        help="the text to continue, or an encoder-decoder's source; default: a new line",
    )  # fmt: skip
    add("--chat", action="store_true", help="the prompt is a message: answer it")
    add("--tokens", type=int, metavar="N", help="how many tokens; default: 400, or what fits")
    add(
        "--temperature", type=float, metavar="T",
        help="below 1 sharpens the distribution, 0 takes the likeliest token; default: 0.8",
    )  # fmt: skip
    add("--top-k", type=int, metavar="K", help="draw among the K likeliest tokens")
    add("--top-p", type=float, metavar="P", help="draw among the likeliest that hold mass P")
    add("--min-p", type=float, metavar="P", help="draw among those at least P times the likeliest")
    add("--typical-p", type=float, metavar="P", help="draw among the most typical with mass P")
    add("--repetition-penalty", type=float, metavar="P", help="above 1: what was said is unlikely")
    add(
        "--presence-penalty",
        type=float,
        metavar="A",
        help="subtract A from the logit of each token written",
    )
    add(
        "--frequency-penalty",
        type=float,
        metavar="A",
        help="subtract A times the count of the token",
    )
    add("--no-repeat-ngram", type=int, metavar="N", help="never the same N tokens twice")
    add("--ban", metavar="TEXT", help="never generate the tokens of this text")
    add("--force", metavar="TEXT", help="begin with this text")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    text = "N texts; the prompt is read once; of a run, only of task language"
    add("--samples", type=int, metavar="N", help=text)
    text = "search with N beams; shows the best, or --samples of them"
    add("--beams", type=int, metavar="N", help=text)
    add(
        "--length-penalty", type=float, metavar="A",
        help="of a beam search: log p is divided by length^A; default: 0",
    )  # fmt: skip
    add("--lookup", type=int, metavar="N", help="propose N tokens at a time from the text so far")
    add("--prompts", metavar="FILE", help="continue every line of a file, or of - standard input")
    add("--slots", type=int, metavar="N", help="--prompts that run at a time; default: 8")
    add(
        "--cache-dtype", choices=("float32", "bfloat16", "int8"),
        help="of keys and values; default: the model's; int8 takes a quarter of float32",
    )  # fmt: skip
    add(
        "--dtype", choices=("float32", "bfloat16", "float16"),
        help="of --model: what its parameters become; default: what they are",
    )  # fmt: skip
    add(
        "--weights", choices=("bf16", "int8", "int4"),
        help="hold the weights in this type; int8 takes a quarter of float32's memory",
    )  # fmt: skip
    add("--max-len", type=int, metavar="N", help="of --model: another longest text than its own")
    add("--seed", type=int, metavar="N", help="all randomness follows from it; default: 0")
    return parser
