"""Generate text with a run or a published model.

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

from transformer_jax.cli.command import TypedModelOptions, report_unknown, run
from transformer_jax.cli.flags import WORDS
from transformer_jax.config import ConfigError
from transformer_jax.config.fields import FieldValue
from transformer_jax.config.tasks import PrefixTask, Seq2SeqTask

if TYPE_CHECKING:
    from transformer_jax.decoding.logit_processors import HistoryProcessor
    from transformer_jax.text.language_model import LanguageModel

T = TypeVar("T")

ANSWERED = "masks", "labels", "targets", "chat"
"""Kinds of models that need a prompt, and that answer every line of a file."""

FORMS = "schema", "regex", "grammar"
"""Options that constrain the output."""

SAMPLING = "temperature", "top_k", "top_p", "min_p", "typical_p", "seed"
"""Sampling options."""


@dataclass(frozen=True, kw_only=True)
class Generate(TypedModelOptions):
    """Command-line options."""

    prompt: str | None = None
    """The text to continue, or the source of an encoder-decoder; default: a newline."""
    languages: str | None = None
    """Source and target language of a translation model, as FROM,TO, such as eng_Latn,fra_Latn."""
    chat: bool = False
    """Treat the prompt as a chat message and answer it."""
    num_tokens: int | None = None
    """Maximum number of new tokens; default: 400, or as many as fit."""
    temperature: float | None = None
    """Sampling temperature: values below 1 sharpen the distribution, and 0 picks the likeliest
    token; default: 0.8."""
    top_k: int | None = None
    """Number of likeliest tokens to sample from (top-k)."""
    top_p: float | None = None
    """Total probability of the likeliest tokens to sample from (top-p)."""
    min_p: float | None = None
    """Sample from tokens whose probability is at least this fraction of the largest probability."""
    typical_p: float | None = None
    """Total probability of the most typical tokens to sample from."""
    repetition_penalty: float | None = None
    """Repetition penalty: values above 1 make tokens that are already in the text less likely."""
    presence_penalty: float | None = None
    """Value to subtract from the logit of each token that has been generated."""
    frequency_penalty: float | None = None
    """Value to subtract from the logit of a token for each time that it has been generated."""
    no_repeat_ngram: int | None = None
    """Never generate the same sequence of this many tokens twice."""
    ban: str | None = None
    """Exclude the tokens of this text."""
    force: str | None = None
    """Begin the output with this text."""
    stop: tuple[str, ...] = field(default=(), metadata=WORDS)
    """Stop before any of these strings."""
    schema: str | None = None
    """File with a JSON schema that the output must satisfy."""
    regex: str | None = None
    """Regular expression that the output must match."""
    grammar: str | None = None
    """File with a grammar, in Lark's syntax, that the output must match."""
    samples: int | None = None
    """Number of texts to sample, of best texts with --beams, or of likeliest tokens for a
    [MASK]."""
    beams: int | None = None
    """Width of a beam search, which prints the best text or, with --samples, several best texts."""
    length_penalty: float | None = None
    """With --beams: exponent alpha in the score log p / length^alpha; default: 0, or 1 for a run on
    pairs."""
    lookup: int | None = None
    """Number of tokens to propose at a time from the text so far (prompt lookup)."""
    prompts: str | None = None
    """Continue every line of this file; - reads standard input."""
    slots: int | None = None
    """Number of --prompts to process at the same time; default: 8."""
    cache_dtype: Literal["float32", "bfloat16", "int8"] | None = None
    """Dtype of the key/value cache; default: the compute dtype. int8 needs a quarter of the memory
    of float32."""
    max_len: int | None = None
    """For a published model: maximum text length, instead of the model's own limit."""
    seed: int | None = None
    """Random seed; default: 0."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run(Generate, argv, generate)


def generate(options: Generate) -> None:
    """Generate text and print it."""
    if options.seed is not None and not 0 <= options.seed < 2**32:
        raise ConfigError(f"seed is {options.seed}: must be at least 0 and below 2**32")
    # These options are mutually exclusive. GenerateOptions, below, checks all others.
    excluded = {"lookup": ("prompts", "beams", "samples", *FORMS), "beams": FORMS}
    excluded["prompts"] = ("prompt",) if options.beams else ("prompt", "samples")
    for method, names in excluded.items():
        for name in names if getattr(options, method) is not None else ():
            if getattr(options, name) is not None:
                raise ConfigError(f"pass only one of {name} and {method}")
    if options.prompts is None and options.slots is not None:
        raise ConfigError(f"slots is {options.slots}: needs prompts")
    sampled = [name for name in SAMPLING if getattr(options, name) is not None]
    # Beam search would silently ignore these options.
    if options.beams is not None and (sampled or options.stop):
        raise ConfigError(f"{[*sampled, 'stop'][0]} is not supported with beams")
    from transformer_jax.text.options import GENERATES, SEARCHES, GenerateOptions

    shared = {"num_tokens", "beams", "length_penalty", "slots", "cache_dtype"}
    settings = {name: x for name in shared if (x := getattr(options, name)) is not None}
    settings |= {"stop": options.stop, **_form(options)}
    if options.beams is None:
        import jax

        from transformer_jax.decoding import samplers

        steps: dict[str, Callable[[FieldValue], samplers.Processor]] = dict(
            temperature=samplers.Temperature, top_k=samplers.TopK, top_p=samplers.TopP,
            min_p=samplers.MinP, typical_p=samplers.Typical,
        )  # fmt: skip
        values = {name: getattr(options, name) for name in steps}
        if values["temperature"] is None:
            values["temperature"] = 0.8
        parts = (_make(n, value, steps[n]) for n, value in values.items() if value is not None)
        sampler = samplers.Sample(*parts)
        settings |= {"sampler": sampler, "key": jax.random.key(options.seed or 0)}
    if options.samples is not None:
        settings["samples" if options.beams is None else "results"] = options.samples
    try:
        GenerateOptions(**settings)  # raise errors before a large model is loaded
    except ValueError as error:
        # The command calls the number of results --samples.
        raise ConfigError(str(error).replace("results", "samples")) from None
    model = options.load(dtype=options.dtype, max_len=options.max_len, weights=options.weights)
    chats, count = options.chat or model.kind == "chat", settings.pop("num_tokens", None)
    if options.languages is not None:
        pair = options.languages.split(",")
        if len(pair) != 2:
            rule = "must be two languages, such as eng_Latn,fra_Latn"
            raise ConfigError(f"languages is {options.languages!r}: {rule}")
        model = model.with_languages(*pair)
    subject = model.name if model.task is None else f"a run for task {model.task.kind!r}"
    usual = "prompt", "prompts", "checkpoint"
    kinds = {"masks": (*usual, "samples"), "labels": usual, "signals": ("prompts", "checkpoint")}
    supported = kinds.get(model.kind, ())
    loads = "model", "init_from", "dtype", "weights", "max_len"
    for name in (one.name for one in fields(options)) if supported else ():
        value = getattr(options, name)
        if name not in (*loads, *supported) and value not in (None, False, ()):
            rule = f"{subject} supports only {', '.join(supported)}"
            raise ConfigError(f"{name} is {value!r}: {rule}")
    if model.kind == "signals":
        task: Any = model.task  # a `ReadsNumbers`
        if options.prompts is None:
            raise ConfigError(f"prompts is None: {subject} reads numbers; pass a .npz file")
        file = options.prompts
        print("\n".join(task.answer_file(model.run, model.tokenizers, model.params, file)))
        return
    texts = [options.prompt or ""]
    if options.prompts is not None:
        texts = _prompts(options.prompts, every_line=model.kind in ANSWERED)
    elif not options.prompt and model.kind in ANSWERED:
        raise ConfigError(f"prompt is '': {subject} needs prompt or prompts")
    report_unknown("generate", model.tokenizers.of_source, texts, model.masks)
    settings["processors"] = _processors(options, model)
    # A run on pairs decodes as in its evaluation. A published translation model samples or
    # searches.
    run_on_pairs = model.kind == "targets" and model.task is not None
    if run_on_pairs and not (sampled or options.samples):
        settings = {n: value for n, value in settings.items() if n not in ("sampler", "key")}
    reads = model.kind in ("text", "chat")
    ids = [model.read_messages(text) if chats else model.read(text) for text in texts * reads]
    before = texts if model.kind == "text" and not chats else [""] * len(texts)
    ranked = options.beams and (options.samples or options.length_penalty is not None)
    if options.beams is not None and options.prompts is not None and model.kind != "targets":
        raise ConfigError("pass only one of prompts and beams")
    if options.lookup is not None:
        chosen = {n: x for n, x in settings.items() if n not in ("samples", "slots")}
        prompt = ids[0] if chats else texts[0]
        text, out = model.look_up(prompt, count, options.lookup, **chosen)
        print(f"{before[0]}{text.removeprefix(' ') if chats else text}")
        print(
            # Print to stderr, so that only the text is piped.
            f"{int(out.accepted.sum())} of {int(out.proposed.sum())} proposed tokens accepted, "
            f"{int(out.calls)} calls of the model for {int(out.lengths.sum())} tokens",
            file=sys.stderr,
        )
    elif options.beams is not None and model.kind != "masks" and (ranked or not run_on_pairs):
        chosen = {name: value for name, value in settings.items() if name in SEARCHES}
        for n, text in enumerate(texts):
            most = model.fitting(count, [ids[n]]) if reads else count
            for score, found in model.search(ids[n] if chats else text, most, **chosen):
                found = found.removeprefix(" ") if chats else found
                print(f"--- score {score:.4f}\n{before[n]}{found}", flush=True)
    elif model.kind in ("masks", "labels") or (run_on_pairs and not options.samples):
        if model.kind == "labels":
            lines = [f"{label} {probability:.3f}" for label, probability in model.classify(texts)]
        elif model.kind == "masks":
            lines = model.generate(texts)
        else:
            chosen = {name: value for name, value in settings.items() if name in GENERATES}
            if isinstance(model.task, Seq2SeqTask | PrefixTask) and not sampled:
                chosen.setdefault("beams", model.task.beams)
            lines = model.generate(texts, count, **chosen)
        for line in lines:
            if options.prompts:  # escape line breaks, so that each answer is one line
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
            pieces = write(texts[0], count, stream=True, **settings)
            sys.stdout.write(before[0])
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
            sys.stdout.write("\n")
            return
        outputs = write(texts if options.prompts is not None else texts[0], count, **settings)
        before = before if options.prompts is not None else before * len(outputs)
        for number, (start, text) in enumerate(zip(before, outputs, strict=True)):
            print(f"--- {number + 1}\n{start}{text}", flush=True)


def _form(options: Generate) -> dict[str, Any]:
    """Read the constraint on the output from its file, if there is one."""
    from transformer_jax.decoding.structured import check_installed
    from transformer_jax.tokenizers.utf8 import DataError
    from transformer_jax.training.data import Source
    from transformer_jax.untrusted_files import Untrusted

    found: dict[str, Any] = {}
    names = [name for name in FORMS if getattr(options, name) is not None]
    if len(names) > 1:  # before their files are read
        raise ConfigError(f"pass only one of {names[0]} and {names[1]}")
    for name in names:
        check_installed(name)
        value = found[name] = getattr(options, name)
        if name == "grammar":
            found[name] = Source(value, Path(value).read_bytes()).text()
        elif name == "schema":
            found[name] = Untrusted(DataError).json(Path(value).read_bytes(), value, decimals=True)
    return found


def _prompts(path: str, every_line: bool = False) -> list[str]:
    """Return the nonblank lines of a file, where `-` means standard input.

    If `every_line` is true, a blank line raises ConfigError, because each line gets one answer.
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
            f"prompts is {path!r}: line {number} is empty, but every line must have text"
        )
    if not prompts:
        raise ConfigError(f"prompts is {path!r}: must have at least one line with text")
    return prompts


def _processors(options: Generate, model: LanguageModel) -> tuple[HistoryProcessor, ...]:
    """Return the logit processors that the options select."""
    from transformer_jax.decoding import logit_processors as kinds

    out: list[HistoryProcessor] = []
    numbered: dict[str, Callable[[FieldValue], HistoryProcessor]] = dict(
        repetition_penalty=kinds.RepetitionPenalty, presence_penalty=kinds.PresencePenalty,
        frequency_penalty=kinds.FrequencyPenalty, no_repeat_ngram=kinds.NoRepeatNGram,
    )  # fmt: skip
    for name, kind in numbered.items():
        value = getattr(options, name)
        if value is not None:
            out.append(_make(name, value, kind))
    listed: dict[str, Callable[..., HistoryProcessor]] = dict(ban=kinds.Ban, force=kinds.Force)
    for name, of_ids in listed.items():
        text = getattr(options, name)
        if text is not None:
            ids = model.tokenizer.encode(text).tolist() if text else []
            if ids and max(ids) >= (size := model.config.vocab_size):
                rule = f"has token ID {max(ids)}, but the model has only {size} tokens"
                raise ConfigError(f"{name} is {text!r}: {rule}")
            out.append(_make(name, text, lambda _, of_ids=of_ids, ids=ids: of_ids(*ids)))  # type: ignore[misc]
    return tuple(out)


def _make(name: str, value: FieldValue, kind: Callable[[FieldValue], T]) -> T:
    """Return `kind(value)`, and convert a ValueError to a ConfigError that names the flag."""
    try:
        return kind(value)
    except ValueError as error:
        rule = str(error).partition(": ")[2] or str(error)
        raise ConfigError(f"{name} is {value!r}: {rule}") from None
