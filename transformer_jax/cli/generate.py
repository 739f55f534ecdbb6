"""Continue a text with a trained run or a published model, from the command line.

python -m transformer_jax generate --model RUN --prompt TEXT
python -m transformer_jax generate --model RUN --prompts FILE --slots 8
python -m transformer_jax generate --model FOLDER_OR_ID --prompt TEXT --chat
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from transformer_jax.cli.command import TypedModelOptions, run, say_unknown
from transformer_jax.cli.flags import WORDS
from transformer_jax.config import ConfigError
from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.config.fields import FieldValue
from transformer_jax.config.tasks import PrefixTask, Seq2SeqTask

if TYPE_CHECKING:
    import numpy as np

    from transformer_jax.decoding.logit_processors import HistoryProcessor
    from transformer_jax.decoding.samplers import Processor, Sample
    from transformer_jax.loading import TextModel
    from transformer_jax.text.language_model import LanguageModel

T = TypeVar("T")

Options: TypeAlias = dict[str, Any]
"""Arguments by name, of functions that take them alike: each has types of its own for them."""


@dataclass(frozen=True, kw_only=True)
class Generate(TypedModelOptions):
    """Options of the command."""

    prompt: str | None = None
    """The text to continue, or an encoder-decoder's source; default: a new line."""
    languages: str | None = None
    """FROM,TO: what a translator reads and what it writes: eng_Latn,fra_Latn."""
    chat: bool = False
    """The prompt is a message: answer it."""
    num_tokens: int | None = None
    """How many tokens; default: 400, or what fits."""
    temperature: float | None = None
    """Below 1 sharpens the distribution, 0 takes the likeliest token; default: 0.8."""
    top_k: int | None = None
    """Draw among the K likeliest tokens."""
    top_p: float | None = None
    """Draw among the likeliest tokens that have mass P."""
    min_p: float | None = None
    """Draw among those at least P times the likeliest."""
    typical_p: float | None = None
    """Draw among the most typical with mass P."""
    repetition_penalty: float | None = None
    """Above 1: what was said is unlikely."""
    presence_penalty: float | None = None
    """Subtract A from the logit of each token written."""
    frequency_penalty: float | None = None
    """Subtract A times the count of the token."""
    no_repeat_ngram: int | None = None
    """Never the same N tokens twice."""
    ban: str | None = None
    """Never generate the tokens of this text."""
    force: str | None = None
    """Begin with this text."""
    stop: tuple[str, ...] = field(default=(), metadata=WORDS)
    """End before these texts."""
    schema: str | None = None
    """File of a JSON schema: write JSON of it."""
    regex: str | None = None
    """Write a text that matches this regular expression."""
    grammar: str | None = None
    """File of a grammar, in Lark's syntax: write a text of it."""
    samples: int | None = None
    """N texts drawn after one prompt; of --beams, the best N; of a [MASK], its N likeliest."""
    beams: int | None = None
    """Search with N beams; shows the best, or --samples of them."""
    length_penalty: float | None = None
    """Of a beam search: log p is divided by length^A; default: 0, of a run on pairs 1."""
    lookup: int | None = None
    """Propose N tokens at a time from the text so far."""
    prompts: str | None = None
    """Continue every line of a file, or of - standard input."""
    slots: int | None = None
    """--prompts that run at a time; default: 8."""
    cache_dtype: Literal["float32", "bfloat16", "int8"] | None = None
    """Type of keys and values; default: the model's; int8 takes a quarter of float32."""
    max_len: int | None = None
    """Of a published model: another longest text than its own."""
    seed: int | None = None
    """All randomness follows from it; default: 0."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 (the run cannot be read) or 2 (usage)."""
    return run(Generate, argv, generate)


def generate(arguments: Generate) -> None:
    """Write as the options say."""
    if arguments.seed is not None and not 0 <= arguments.seed < 2**32:
        raise ConfigError(f"seed is {arguments.seed}: must be at least 0 and below 2**32")
    if arguments.num_tokens is not None and arguments.num_tokens < 1:
        raise ConfigError(f"num_tokens is {arguments.num_tokens}: must be positive")
    _one_way(arguments)
    from transformer_jax.decoding.writer import check_stop_strings

    sampler, stop = _sampler(arguments), check_stop_strings(arguments.stop)
    form = _form(arguments)
    model = arguments.load(
        dtype=arguments.dtype, max_len=arguments.max_len, weights=arguments.weights
    )
    _check_read(arguments, model)
    if model.kind == "chat":
        arguments = replace(arguments, chat=True)
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


def _form(arguments: Generate) -> Options:
    """Return the form that a text is to have, as `generate` takes it, read from its file."""
    names = [name for name in _FORMS if getattr(arguments, name) is not None]
    if not names:
        return {}
    if len(names) > 1:
        raise ConfigError(f"{names[0]} and {names[1]}: give one of them")
    for way in ("beams", "lookup"):
        if getattr(arguments, way) is not None:
            raise ConfigError(f"{names[0]} and {way}: give one of them")
    from transformer_jax.decoding.structured import check_installed
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


def _check_read(arguments: Generate, model: LanguageModel) -> None:
    """Raise ConfigError for a flag that a model of its kind does not read."""
    common, run = ("prompt", "prompts", "checkpoint"), model.task is not None
    flags: tuple[str, ...] | None = {
        "masks": (*common, "samples"), "labels": common
    }.get(model.kind)  # fmt: skip
    if model.kind == "signals":
        flags = "prompts", "checkpoint"
    elif model.kind == "targets" and run:
        flags = (*common, "beams", "samples", "length_penalty", "num_tokens", "languages")
    if flags is not None:
        own = "model", "init_from", "dtype", "weights", "max_len"
        for name in (one.name for one in fields(arguments)):
            value = getattr(arguments, name)
            if name not in (*own, *flags) and value not in (None, False, ()):
                raise ConfigError(f"{name} is {value!r}: {_named(model)} reads {', '.join(flags)}")
    if model.kind == "targets" and run and arguments.samples and not arguments.beams:
        rule = "draws nothing: several targets need beams"
        raise ConfigError(f"samples is {arguments.samples}: {_named(model)} {rule}")
    if model.kind == "targets" and not run:
        for name in ("lookup", "chat", "slots"):
            if getattr(arguments, name):
                raise ConfigError(f"{name}: needs a decoder, {model.name} is an encoder-decoder")


def _answer(arguments: Generate, model: LanguageModel, texts: list[str]) -> None:
    """Print what a model of a task makes of each text: its class, its target, its masks filled."""
    if model.kind == "labels":
        found = [f"{label} {probability:.3f}" for label, probability in model.classify(texts)]
    elif model.kind == "masks":
        found = model.generate(texts)
    else:
        task = model.task
        beams = task.beams if isinstance(task, Seq2SeqTask | PrefixTask) else 1
        found = model.generate(texts, arguments.num_tokens, beams=arguments.beams or beams)
    for text in found:
        if arguments.prompts:  # an answer is one line to every reader of lines
            text = "".join(ascii(c)[1:-1] if c.splitlines() == [""] else c for c in text)
        print(text, flush=True)
    if model.kind == "masks" and arguments.prompts is None:
        from transformer_jax.tokenizers.pieces import marked

        for likely in model.candidates(texts[0], count=arguments.samples or 5):
            print("  " + "  ".join(f"{marked(text)} {p:.3f}" for text, p in likely))


def _hear_or_see(arguments: Generate, model: LanguageModel) -> None:
    """Print a line for each picture or sound of a file."""
    task: Any = model.task  # that `ReadsNumbers`
    run = model.model.run
    if arguments.prompts is None:
        raise ConfigError(f"prompts is None: {_named(model)} reads numbers: give a .npz file")
    print("\n".join(task.answer_file(run, model.tokenizers, model.params, arguments.prompts)))


def _continue(arguments: Generate, model: LanguageModel, texts: list[str], given: Options) -> None:
    """Write texts: one as it comes, or whole ones, each after its prompt."""
    shown = [""] if arguments.chat or model.kind == "targets" else texts
    shown = shown * len(texts) if len(shown) < len(texts) else shown
    write: Any = model.chat if arguments.chat else model.generate
    whole = arguments.prompts, arguments.samples, arguments.lookup
    count = arguments.num_tokens
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
    arguments: Generate,
    model: LanguageModel,
    prompt: np.ndarray,
    before: str,
    count: int | None,
    given: Options,
) -> None:
    """Print a text that is written by looking up what followed the same words, and what it cost."""
    from transformer_jax.decoding.completion import TextGenerator
    from transformer_jax.text.writing import sized

    given = given | {"processors": (*model.model.processors, *given["processors"])}
    generator = TextGenerator(
        model.config, model.params, model.tokenizer, stop_ids=model.model.stop_ids, **given
    )
    assert count is not None and arguments.lookup is not None
    text, out = sized(generator, [prompt], count).look_up(prompt, count, arguments.lookup)
    print(f"{before}{text.removeprefix(' ') if arguments.chat else text}")
    print(
        f"{int(out.accepted.sum())} of {int(out.proposed.sum())} proposed tokens accepted, "
        f"{int(out.calls)} calls of the model for {int(out.lengths.sum())} tokens",
        file=sys.stderr,
    )


def _search(arguments: Generate, model: LanguageModel, texts: list[str], given: Options) -> None:
    """Print the best texts of beam searches, with their scores."""
    if arguments.prompts is not None and model.kind != "targets":
        raise ConfigError("prompts and beams: give one of them")
    for text in texts:
        read = model.read_messages(text) if arguments.chat else text
        count, before = arguments.num_tokens, "" if arguments.chat else text
        if model.kind == "targets":
            before = ""
        else:
            ids = model.read(text) if isinstance(read, str) else read
            count = _fitting(count, model.room(ids), model.config)
        found = model.search(
            read, count, beams=arguments.beams or 1, results=arguments.samples or 1,
            length_penalty=arguments.length_penalty, **given,
        )  # fmt: skip
        for score, written in found:
            written = written.removeprefix(" ") if arguments.chat else written
            print(f"--- score {score:.4f}\n{before}{written}", flush=True)


def _fitting(tokens: int | None, left: int, config: AnyModelConfig) -> int:
    """Return how many tokens to write: those asked for, else as many as fit, up to 400."""
    from transformer_jax.decoding import completion

    if left < 1 or (tokens or 1) > left:
        fits = f"{max(left, 0)} fit after the prompt (max_len {completion.longest_text(config)})"
        raise ConfigError(f"num_tokens is {tokens or 1}: {fits}")
    return tokens or min(left, 400)


def _one_way(arguments: Generate) -> None:
    """Refuse ways of decoding that exclude each other, and flags that would not be read."""
    ways = [name for name in ("prompts", "beams", "lookup") if getattr(arguments, name) is not None]
    if len(ways) > 1 and ways != ["prompts", "beams"]:  # which a run on pairs takes
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
            if getattr(arguments, name) not in (None, ()):
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


def _processors(arguments: Generate, model: TextModel) -> tuple[HistoryProcessor, ...]:
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


def _sampler(arguments: Generate) -> Sample:
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
