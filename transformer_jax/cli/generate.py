"""Continue a text with a trained run or a published model, from the command line.

python -m transformer_jax generate --model RUN --prompt TEXT
python -m transformer_jax generate --model RUN --prompts FILE --slots 8
python -m transformer_jax generate --model FOLDER_OR_ID --prompt TEXT --chat
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from transformer_jax.cli.command import TypedModelOptions, run, say_unknown
from transformer_jax.cli.flags import WORDS
from transformer_jax.config import ConfigError
from transformer_jax.config.fields import FieldValue
from transformer_jax.config.tasks import PrefixTask, Seq2SeqTask

if TYPE_CHECKING:
    from transformer_jax.decoding.logit_processors import HistoryProcessor
    from transformer_jax.decoding.samplers import Processor
    from transformer_jax.text.language_model import LanguageModel

T = TypeVar("T")

ANSWERED = "masks", "labels", "targets", "chat"
"""Kinds of models that need a text, and answer every line of a file."""

FORMS = "schema", "regex", "grammar"
"""Options that describe the form of a text."""

DRAWN = "temperature", "top_k", "top_p", "min_p", "typical_p", "seed"
"""Options that describe how a token is drawn."""


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


def generate(options: Generate) -> None:
    """Write as the options say."""
    if options.seed is not None and not 0 <= options.seed < 2**32:
        raise ConfigError(f"seed is {options.seed}: must be at least 0 and below 2**32")
    # the functions below check the rest: these are options of other functions than those they meet
    # Each way of writing is a method of its own, and they do not combine.
    excluded = {"lookup": ("prompts", "beams", "samples", *FORMS), "beams": FORMS}
    excluded["prompts"] = ("prompt",) if options.beams else ("prompt", "samples")
    for way, names in excluded.items():
        for name in names if getattr(options, way) is not None else ():
            if getattr(options, name) is not None:
                raise ConfigError(f"{name} and {way}: give one of them")
    if options.prompts is None and options.slots is not None:
        raise ConfigError(f"slots is {options.slots}: needs prompts")
    drawn = [name for name in DRAWN if getattr(options, name) is not None]
    # A search would ignore them silently.
    if options.beams is not None and (drawn or options.stop):
        raise ConfigError(f"{[*drawn, 'stop'][0]} with beams: a beam search takes none")
    from transformer_jax.text.options import GENERATES, SEARCHES, GenerateOptions

    kept = {"num_tokens", "beams", "length_penalty", "slots", "cache_dtype"}
    given = {name: x for name in kept if (x := getattr(options, name)) is not None}
    given |= {"stop": options.stop, **_form(options), **_sampling(options)}
    if options.samples is not None:
        given["samples" if options.beams is None else "results"] = options.samples
    try:
        # The option of the command has another name than that of the method.
        GenerateOptions(**given)  # before a large model is read
    except ValueError as error:
        raise ConfigError(str(error).replace("results", "samples")) from None
    model = options.load(dtype=options.dtype, max_len=options.max_len, weights=options.weights)
    chats, count = options.chat or model.kind == "chat", given.pop("num_tokens", None)
    if options.languages is not None:
        pair = options.languages.split(",")
        if len(pair) != 2:
            rule = "must be two, such as eng_Latn,fra_Latn"
            raise ConfigError(f"languages is {options.languages!r}: {rule}")
        model = model.with_languages(*pair)
    named = model.name if model.task is None else f"a run of task {model.task.kind!r}"
    usual = "prompt", "prompts", "checkpoint"
    kinds = {"masks": (*usual, "samples"), "labels": usual, "signals": ("prompts", "checkpoint")}
    known = kinds.get(model.kind, ())
    loads = "model", "init_from", "dtype", "weights", "max_len"
    for name in (one.name for one in fields(options)) if known else ():
        value = getattr(options, name)
        if name not in (*loads, *known) and value not in (None, False, ()):
            raise ConfigError(f"{name} is {value!r}: {named} reads {', '.join(known)}")
    if model.kind == "signals":
        task: Any = model.task  # that `ReadsNumbers`
        if options.prompts is None:
            raise ConfigError(f"prompts is None: {named} reads numbers: give a .npz file")
        file = options.prompts
        print("\n".join(task.answer_file(model.run, model.tokenizers, model.params, file)))
        return
    texts = [options.prompt or ""]
    if options.prompts is not None:
        texts = _prompts(options.prompts, every_line=model.kind in ANSWERED)
    elif not options.prompt and model.kind in ANSWERED:
        raise ConfigError(f"prompt is '': {named} needs one, or prompts")
    say_unknown("generate", model.tokenizers.of_source, texts, model.masks)
    given["processors"] = _processors(options, model)
    # A run on pairs writes as its task judges it; a published translator draws or searches.
    of_pairs = model.kind == "targets" and model.task is not None
    if of_pairs and not (drawn or options.samples):  # its task takes the likeliest, or searches
        given = {name: value for name, value in given.items() if name not in ("sampler", "key")}
    reads = model.kind in ("text", "chat")
    ids = [model.read_messages(text) if chats else model.read(text) for text in texts * reads]
    before = texts if model.kind == "text" and not chats else [""] * len(texts)
    ranked = options.beams and (options.samples or options.length_penalty is not None)
    if options.beams is not None and options.prompts is not None and model.kind != "targets":
        raise ConfigError("prompts and beams: give one of them")
    if options.lookup is not None:
        chosen = {n: x for n, x in given.items() if n not in ("samples", "slots")}
        read = ids[0] if chats else texts[0]
        text, out = model.look_up(read, count, options.lookup, **chosen)
        print(f"{before[0]}{text.removeprefix(' ') if chats else text}")
        print(
            # On stderr, so that the text alone can be piped.
            f"{int(out.accepted.sum())} of {int(out.proposed.sum())} proposed tokens accepted, "
            f"{int(out.calls)} calls of the model for {int(out.lengths.sum())} tokens",
            file=sys.stderr,
        )
    elif options.beams is not None and model.kind != "masks" and (ranked or not of_pairs):
        chosen = {name: value for name, value in given.items() if name in SEARCHES}
        for n, text in enumerate(texts):
            most = model.fitting(count, [ids[n]]) if reads else count
            for score, found in model.search(ids[n] if chats else text, most, **chosen):
                found = found.removeprefix(" ") if chats else found
                print(f"--- score {score:.4f}\n{before[n]}{found}", flush=True)
    elif model.kind in ("masks", "labels") or (of_pairs and not options.samples):
        if model.kind == "labels":
            lines = [f"{label} {probability:.3f}" for label, probability in model.classify(texts)]
        elif model.kind == "masks":
            lines = model.generate(texts)
        else:
            chosen = {name: value for name, value in given.items() if name in GENERATES}
            if isinstance(model.task, Seq2SeqTask | PrefixTask) and not drawn:
                chosen.setdefault("beams", model.task.beams)
            lines = model.generate(texts, count, **chosen)
        for line in lines:
            if options.prompts:  # an answer is one line to every reader of lines
                line = "".join(ascii(c)[1:-1] if c.splitlines() == [""] else c for c in line)
            print(line, flush=True)
        if model.kind == "masks" and options.prompts is None:
            from transformer_jax.tokenizers.pieces import marked

            for likely in model.candidates(texts[0], count=options.samples or 5):
                print("  " + "  ".join(f"{marked(text)} {p:.3f}" for text, p in likely))
    else:
        write: Any = model.chat if chats else model.generate
        if reads and (options.prompts is not None or options.samples is not None):
            count = model.fitting(count, ids)
        if options.prompts is None and options.samples is None:
            pieces = write(texts[0], count, stream=True, **given)
            sys.stdout.write(before[0])
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
            sys.stdout.write("\n")
            return
        whole = write(texts if options.prompts is not None else texts[0], count, **given)
        before = before if options.prompts is not None else before * len(whole)
        for number, (start, text) in enumerate(zip(before, whole, strict=True)):
            print(f"--- {number + 1}\n{start}{text}", flush=True)


def _form(options: Generate) -> dict[str, Any]:
    """Return the form that a text is to have, read from its file."""
    from transformer_jax.decoding.structured import check_installed
    from transformer_jax.tokenizers.utf8 import DataError
    from transformer_jax.training.data import Source
    from transformer_jax.untrusted_files import Untrusted

    found: dict[str, Any] = {}
    names = [name for name in FORMS if getattr(options, name) is not None]
    if len(names) > 1:  # before their files are read
        raise ConfigError(f"{names[0]} and {names[1]}: give one of them")
    for name in names:
        check_installed(name)
        given = found[name] = getattr(options, name)
        if name != "regex":
            content = Path(given).read_bytes()
            text = name == "grammar"
            found[name] = (
                Source(given, content).text()
                if text
                else Untrusted(DataError).json(content, given, decimals=True)
            )
    return found


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


def _processors(options: Generate, model: LanguageModel) -> tuple[HistoryProcessor, ...]:
    """Return what the options change of the logits before a token is drawn."""
    from transformer_jax.decoding import logit_processors as kinds

    out: list[HistoryProcessor] = []
    numbered: dict[str, Callable[[FieldValue], HistoryProcessor]] = dict(
        repetition_penalty=kinds.RepetitionPenalty, presence_penalty=kinds.PresencePenalty,
        frequency_penalty=kinds.FrequencyPenalty, no_repeat_ngram=kinds.NoRepeatNGram,
    )  # fmt: skip
    for name, kind in numbered.items():
        value = getattr(options, name)
        if value is not None:
            out.append(_valued(name, value, kind))
    listed: dict[str, Callable[..., HistoryProcessor]] = dict(ban=kinds.Ban, force=kinds.Force)
    for name, of_ids in listed.items():
        text = getattr(options, name)
        if text is not None:
            ids = model.tokenizer.encode(text).tolist() if text else []
            if ids and max(ids) >= (known := model.config.vocab_size):
                rule = f"has id {max(ids)}: the model has {known} tokens"
                raise ConfigError(f"{name} is {text!r}: {rule}")
            out.append(_valued(name, text, lambda _, of_ids=of_ids, ids=ids: of_ids(*ids)))  # type: ignore[misc]
    return tuple(out)


def _valued(name: str, value: FieldValue, kind: Callable[[FieldValue], T]) -> T:
    """Return a value made of a flag's; ConfigError names the flag."""
    try:
        return kind(value)
    except ValueError as error:
        rule = str(error).partition(": ")[2] or str(error)
        raise ConfigError(f"{name} is {value!r}: {rule}") from None


def _sampling(options: Generate) -> dict[str, Any]:
    """Return how the options draw a token: a sampler and its key, or neither for a search."""
    if options.beams is not None:
        return {}
    import jax

    from transformer_jax.decoding.samplers import MinP, Sample, Temperature, TopK, TopP, Typical

    kinds: dict[str, Callable[[FieldValue], Processor]] = dict(
        temperature=Temperature, top_k=TopK, top_p=TopP, min_p=MinP, typical_p=Typical
    )
    given = {name: getattr(options, name) for name in kinds}
    if given["temperature"] is None:
        given["temperature"] = 0.8
    named = {name: value for name, value in given.items() if value is not None}
    sampler = Sample(*(_valued(name, value, kinds[name]) for name, value in named.items()))
    return {"sampler": sampler, "key": jax.random.key(options.seed or 0)}
