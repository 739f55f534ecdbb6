"""Continue a text with a trained run or a published model, from the command line.

python -m transformer_jax generate --run FOLDER --prompt TEXT
python -m transformer_jax generate --run FOLDER --prompts FILE --slots 8
python -m transformer_jax generate --model FOLDER_OR_ID --prompt TEXT --chat
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from transformer_jax.cli.command import Parser, add_run, load_run, run, say_unknown
from transformer_jax.config import ConfigError
from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.config.fields import FieldValue
from transformer_jax.config.tasks import DigitsTask, PrefixTask, Seq2SeqTask, TonesTask

if TYPE_CHECKING:
    import numpy as np

    from transformer_jax.decoding.logit_processors import HistoryProcessor
    from transformer_jax.decoding.samplers import Processor, Sample
    from transformer_jax.text.text_model import TextModel
    from transformer_jax.use.language_model import LanguageModel

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
    from transformer_jax.text.writer import check_stop_strings
    from transformer_jax.use import language_model

    sampler, stop = _sampler(arguments), check_stop_strings(arguments.stop or ())
    form = _form(arguments)
    if arguments.run is not None:
        loaded = load_run("generate", arguments)
        if arguments.weights is not None:
            loaded = language_model.with_weights_held(loaded, arguments.weights)
        model = language_model.LanguageModel(loaded, arguments.run)
    else:
        model = language_model.load(
            arguments.model, dtype=arguments.dtype, max_len=arguments.max_len,
            weights=arguments.weights,
        )  # fmt: skip
    _check_read(arguments, model)
    if arguments.languages is not None:
        model = model.with_languages(*_languages(arguments.languages))
    if model.kind == "signals":
        _hear_or_see(arguments, model)
        return
    texts = [arguments.prompt or ""]
    if arguments.prompts is not None:
        texts = _prompts(arguments.prompts, every_line=model.kind in _ANSWERED)
    elif not arguments.prompt and model.kind in _ANSWERED:
        raise ConfigError(f"prompt is '': {_named(model)} needs one, or prompts")
    say_unknown("generate", model.tokenizers.of_source, texts, model.masks)
    ranked = arguments.beams and (arguments.samples or arguments.length_penalty is not None)
    of_pairs = model.kind == "targets" and model.task is not None
    if model.kind in ("masks", "labels") or (of_pairs and not ranked):
        _answer(arguments, model, texts)
        return
    if of_pairs:
        _search(arguments, model, texts, {})
        return
    import jax

    given: Options = dict(
        cache_dtype=arguments.cache_dtype, processors=_processors(arguments, model.model)
    )
    if arguments.beams is not None:
        _search(arguments, model, texts, given)
        return
    given |= dict(sampler=sampler, key=jax.random.key(arguments.seed or 0), stop=stop, **form)
    _continue(arguments, model, texts, given)


def _languages(given: str) -> tuple[str, str]:
    names = given.split(",")
    if len(names) != 2:
        raise ConfigError(f"languages is {given!r}: must be two, such as eng_Latn,fra_Latn")
    return names[0], names[1]


def _form(arguments: argparse.Namespace) -> Options:
    """Return the form that a text is to have, as `generate` takes it, read from its file."""
    names = [name for name in _FORMS if getattr(arguments, name) is not None]
    if not names:
        return {}
    if len(names) > 1:
        raise ConfigError(f"{names[0]} and {names[1]}: give one of them")
    for way in ("beams", "lookup"):
        if getattr(arguments, way) is not None:
            raise ConfigError(f"{names[0]} and {way}: give one of them")
    from transformer_jax.text.structured import check_installed
    from transformer_jax.tokenizers.utf8 import DataError
    from transformer_jax.training.data import Source
    from transformer_jax.untrusted_files import Untrusted

    (name,) = names
    check_installed(name)
    given = getattr(arguments, name)
    if name == "regex":
        return {name: given}
    content = Path(given).read_bytes()
    if name == "grammar":
        return {name: Source(given, content).text()}
    return {name: Untrusted(DataError).json(content, given, decimals=True)}


_FORMS = "schema", "regex", "grammar"
"""Flags that say which form a text is to have."""

_ANSWERED = "masks", "labels", "targets", "chat"
"""Kinds of models that need a text, and answer every line of a file."""


def _named(model: LanguageModel) -> str:
    return model.name if model.task is None else f"a run of task {model.task.kind!r}"


def _check_read(arguments: argparse.Namespace, model: LanguageModel) -> None:
    """Raise ConfigError for a flag that a model of its kind does not read."""
    common, run = ("prompt", "prompts", "checkpoint"), model.task is not None
    flags: tuple[str, ...] | None = {
        "masks": (*common, "samples"), "labels": common
    }.get(model.kind)  # fmt: skip
    if model.kind == "signals":
        flags = "prompts", "checkpoint"
    elif model.kind == "targets" and run:
        flags = (*common, "beams", "samples", "length_penalty", "tokens", "languages")
    if flags is not None:
        own = "run", "model", "init_from", "debug", "dtype", "weights", "max_len"
        for name, value in vars(arguments).items():
            if name not in (*own, *flags) and value not in (None, False):
                raise ConfigError(f"{name} is {value!r}: {_named(model)} reads {', '.join(flags)}")
    if model.kind == "targets" and run and arguments.samples and not arguments.beams:
        rule = "draws nothing: several targets need beams"
        raise ConfigError(f"samples is {arguments.samples}: {_named(model)} {rule}")
    if model.kind == "targets" and not run:
        for name in ("lookup", "chat", "slots"):
            if getattr(arguments, name):
                raise ConfigError(f"{name}: needs a decoder, {model.name} is an encoder-decoder")
    if model.kind == "chat":
        arguments.chat = True


def _answer(arguments: argparse.Namespace, model: LanguageModel, texts: list[str]) -> None:
    """Print what a model of a task makes of each text: its class, its target, its masks filled."""
    if model.kind == "labels":
        found = [f"{label} {probability:.3f}" for label, probability in model.classify(texts)]
    elif model.kind == "masks":
        found = model.generate(texts)
    else:
        task = model.task
        beams = task.beams if isinstance(task, Seq2SeqTask | PrefixTask) else 1
        found = model.generate(texts, arguments.tokens, beams=arguments.beams or beams)
    for text in found:
        if arguments.prompts:  # an answer is one line to every reader of lines
            text = "".join(ascii(c)[1:-1] if c.splitlines() == [""] else c for c in text)
        print(text, flush=True)
    if model.kind == "masks" and arguments.prompts is None:
        from transformer_jax.tokenizers.pieces import marked

        for likely in model.candidates(texts[0], count=arguments.samples or 5):
            print("  " + "  ".join(f"{marked(text)} {p:.3f}" for text, p in likely))


def _hear_or_see(arguments: argparse.Namespace, model: LanguageModel) -> None:
    """Print a line for each picture or sound of a file."""
    from transformer_jax.lectures.continuous import answer_signals
    from transformer_jax.lectures.signals import read_signals

    task, run = model.task, model.model.run
    assert isinstance(task, DigitsTask | TonesTask) and run is not None
    if arguments.prompts is None:
        raise ConfigError(f"prompts is None: {_named(model)} reads numbers: give a .npz file")
    signals = read_signals(task, arguments.prompts, targets=False)
    print("\n".join(answer_signals(run, model.tokenizers, model.params, signals)))


def _continue(
    arguments: argparse.Namespace, model: LanguageModel, texts: list[str], given: Options
) -> None:
    """Write texts: one as it comes, or whole ones, each after its prompt."""
    shown = [""] if arguments.chat or model.kind == "targets" else texts
    shown = shown * len(texts) if len(shown) < len(texts) else shown
    write: Any = model.chat if arguments.chat else model.generate
    whole = arguments.prompts, arguments.samples, arguments.lookup
    count = arguments.tokens
    if model.kind == "targets":
        whole = arguments.prompts, arguments.samples, True
    elif any(way is not None for way in whole):
        read = model.read_messages if arguments.chat else model.read
        prompts = [read(text) for text in texts]
        count = _fitting(count, min(map(model.room, prompts)), model.config)
    if arguments.lookup is not None:
        _look_up(arguments, model, prompts[0], shown[0], count, given)
    elif arguments.prompts is not None:
        found = write(texts, count, slots=arguments.slots or 8, **given)
        for number, text in enumerate(found):
            print(f"--- {number + 1}\n{shown[number]}{text}", flush=True)
    elif arguments.samples is not None:
        for number, text in enumerate(write(texts[0], count, samples=arguments.samples, **given)):
            print(f"--- {number + 1}\n{shown[0]}{text}")
    else:
        pieces = write(texts[0], count, stream=True, **given)
        sys.stdout.write(shown[0])
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")


def _look_up(
    arguments: argparse.Namespace,
    model: LanguageModel,
    prompt: np.ndarray,
    before: str,
    count: int,
    given: Options,
) -> None:
    """Print a text that is written by looking up what followed the same words, and what it cost."""
    from transformer_jax.text.completion import TextGenerator
    from transformer_jax.use.writing import sized

    given = given | {"processors": (*model.model.processors, *given["processors"])}
    generator = TextGenerator(
        model.config, model.params, model.tokenizer, stop_ids=model.model.stop_ids, **given
    )
    text, out = sized(generator, [prompt], count).look_up(prompt, count, arguments.lookup)
    print(f"{before}{text.removeprefix(' ') if arguments.chat else text}")
    print(
        f"{int(out.accepted.sum())} of {int(out.proposed.sum())} proposed tokens accepted, "
        f"{int(out.calls)} calls of the model for {int(out.lengths.sum())} tokens",
        file=sys.stderr,
    )


def _search(
    arguments: argparse.Namespace, model: LanguageModel, texts: list[str], given: Options
) -> None:
    """Print the best texts of beam searches, with their scores."""
    if arguments.prompts is not None and model.kind != "targets":
        raise ConfigError("prompts and beams: give one of them")
    for text in texts:
        read = model.read_messages(text) if arguments.chat else text
        count, before = arguments.tokens, "" if arguments.chat else text
        if model.kind == "targets":
            before = ""
        else:
            ids = model.read(text) if isinstance(read, str) else read
            count = _fitting(count, model.room(ids), model.config)
        found = model.search(
            read, count, beams=arguments.beams, results=arguments.samples or 1,
            length_penalty=arguments.length_penalty, **given,
        )  # fmt: skip
        for score, written in found:
            written = written.removeprefix(" ") if arguments.chat else written
            print(f"--- score {score:.4f}\n{before}{written}", flush=True)


def _fitting(tokens: int | None, left: int, config: AnyModelConfig) -> int:
    """Return how many tokens to write: those asked for, else as many as fit, up to 400."""
    from transformer_jax.text import completion

    if left < 1 or (tokens or 1) > left:
        fits = f"{max(left, 0)} fit after the prompt (max_len {completion.longest_text(config)})"
        raise ConfigError(f"tokens is {tokens or 1}: {fits}")
    return tokens or min(left, 400)


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
                rule = "a beam search takes none"
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
    text = "what a translator reads and what it writes: eng_Latn,fra_Latn"
    add("--languages", metavar="FROM,TO", help=text)
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
    add("--schema", metavar="FILE", help="write JSON of this JSON schema")
    add("--regex", metavar="TEXT", help="write a text that matches this regular expression")
    add("--grammar", metavar="FILE", help="write a text of this grammar, in Lark's syntax")
    text = "N texts drawn after one prompt; of --beams, the best N; of a [MASK], its N likeliest"
    add("--samples", type=int, metavar="N", help=text)
    text = "search with N beams; shows the best, or --samples of them"
    add("--beams", type=int, metavar="N", help=text)
    add(
        "--length-penalty", type=float, metavar="A",
        help="of a beam search: log p is divided by length^A; default: 0, of a run on pairs 1",
    )  # fmt: skip
    add("--lookup", type=int, metavar="N", help="propose N tokens at a time from the text so far")
    add("--prompts", metavar="FILE", help="continue every line of a file, or of - standard input")
    add("--slots", type=int, metavar="N", help="--prompts that run at a time; default: 8")
    parser.add_cache_dtype()
    parser.add_dtypes()
    add("--max-len", type=int, metavar="N", help="of --model: another longest text than its own")
    add("--seed", type=int, metavar="N", help="all randomness follows from it; default: 0")
    return parser
