"""Options of writing a text: one value, whose fields are keywords of `generate` and its like."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypedDict

import jax

from transformer_jax.checks import INT32, check_count, check_finite, check_key
from transformer_jax.config import ConfigError
from transformer_jax.config.keywords import refuse_keywords
from transformer_jax.decoding.logit_processors import HistoryProcessor, check_processors
from transformer_jax.decoding.samplers import Greedy, Sample, Temperature
from transformer_jax.decoding.structured import Form
from transformer_jax.decoding.writer import check_stop_strings
from transformer_jax.values import value_class


class Options(TypedDict, total=False):
    """The keywords of `generate`, `chat` and `search`, for type checkers: see `GenerateOptions`."""

    stop: str | Sequence[str]
    sampler: Greedy | Sample | None
    key: jax.Array | None
    processors: Sequence[HistoryProcessor]
    beams: int | None
    results: int
    length_penalty: float | None
    slots: int
    cache_dtype: jax.typing.DTypeLike | None
    schema: Mapping[str, Any] | None
    regex: str | None
    grammar: str | None


FORMS: tuple[Form, ...] = ("schema", "regex", "grammar")
"""Options of which each describes the form of a text."""

CHATS = (
    "stop", "stream", "sampler", "key", "processors", "samples", "slots", "cache_dtype", *FORMS,
)  # fmt: skip
"""Options of `chat`."""

GENERATES = *CHATS, "beams"
"""Options of `generate`."""

SEARCHES = "processors", "cache_dtype", "beams", "results", "length_penalty"
"""Options of `search`."""

LOOKS_UP = "stop", "sampler", "key", "processors", "cache_dtype"
"""Options of `look_up`."""


@value_class(kw_only=True)
class GenerateOptions:
    """How a text is written: the keywords of `generate`, `chat` and `search` of a loaded model.

    Attributes:
        num_tokens: the most tokens that are written, at least 1; None is 400, or for a run on pairs
            as many as it was trained on. If a text exceeds `max_len`, the model re-reads the last
            half and continues. A search, and several samples, write at most as many as fit.
        stop: a string or several; the text ends before the first of them.
        stream: return an iterator of pieces, each as soon as nothing can change it.
        sampler: chooses each token; None takes the likeliest. A `Sample` needs `key`.
        key: a single `jax.random.key`. Text n of a list is drawn with `fold_in(key, n)`.
        processors: change the logits before a token is chosen.
        beams: width of a beam search, which returns the best text; None does not search.
        results: number of texts that a search returns, from 1 to `beams`.
        length_penalty: alpha of a search's score, log p / length^alpha; 0 favours short texts. None
            is 0, or 1 for a run on pairs, whose task judges with it.
        samples: draw this many texts of one prompt and return a list; None draws one.
        slots: number of texts of a list that are written at a time.
        cache_dtype: dtype of cached keys and values; None is the compute dtype.
        schema: a JSON schema; the text is JSON that fits it. At most one of `schema`, `regex` and
            `grammar` may be given; they need the extra `structured`.
        regex: a regular expression, in Rust's syntax, that the whole text matches.
        grammar: a grammar of the text, in llguidance's variant of Lark's syntax.

    Raises:
        ValueError: if a value is out of its range, or two of them exclude each other.
    """

    num_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stream: bool = False
    sampler: Greedy | Sample | None = None
    key: jax.Array | None = None
    processors: Sequence[HistoryProcessor] = ()
    beams: int | None = None
    results: int = 1
    length_penalty: float | None = None
    samples: int | None = None
    slots: int = 8
    cache_dtype: jax.typing.DTypeLike | None = None
    schema: Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        for name in ("beams", "results", "samples", "slots"):
            value = getattr(self, name)
            if value is not None or name in ("results", "slots"):
                check_count(name, value, 1)
        if not isinstance(self.stream, bool):
            raise ValueError(f"stream is {self.stream!r}: must be True or False")
        if self.length_penalty is not None:
            check_finite("length_penalty", self.length_penalty)
        if self.num_tokens is not None:
            check_count("num_tokens", self.num_tokens, 1, INT32.max)
        if self.beams is None and self.length_penalty is not None:
            raise ValueError(f"length_penalty is {self.length_penalty}: needs beams")
        if self.results > (self.beams or 1):
            raise ValueError(f"results is {self.results}: must be at most beams, {self.beams or 1}")
        if self.stream and self.samples is not None:
            raise ValueError("stream and samples: give one of them")
        if self.sampler is not None and not isinstance(self.sampler, Greedy | Sample):
            raise ValueError(f"sampler is {self.sampler!r:.80}: must be Greedy() or a Sample(...)")
        if self.key is not None:
            check_key("key", self.key)
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]}: give one of them")
        # Normal forms: equal options are equal values, and one stop string is a tuple of one.
        object.__setattr__(self, "stop", check_stop_strings(self.stop))
        object.__setattr__(self, "processors", check_processors(self.processors))

    @classmethod
    def of(
        cls,
        function: Callable[..., object],
        names: Collection[str],
        num_tokens: int | None,
        given: Mapping[str, Any],
    ) -> GenerateOptions:
        """Return the options of a call; TypeError for one that is not among `names`.

        Args:
            function: the method that was called.
            names: the options that it has.
            num_tokens: as it was called with.
            given: its other options.
        """
        unknown = {name: value for name, value in given.items() if name not in names}
        refuse_keywords(function, unknown, names)
        return cls(num_tokens=num_tokens, **given)

    def check_one_prompt(self, count: int | None) -> None:
        """Raise ValueError if an option needs a single prompt and `count` are given as a list."""
        if count is not None and (self.stream or self.samples is not None):
            name = "stream" if self.stream else "samples"
            raise ValueError(f"{name}: needs one prompt, not a list of {count}")

    def refuse(self, names: Collection[str], what: str, rule: str) -> None:
        """Raise ConfigError if one of these options was given to a model that cannot use it."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # Greedy() is what no sampler means; an array has no `==` that gives a bool.
            unset = value is None or isinstance(value, Greedy)
            if not isinstance(value, jax.Array):
                unset = unset or value == field.default
            if field.name in names and not unset:
                shown = "a key" if field.name == "key" else value
                raise ConfigError(f"{field.name} is {shown!r:.80}: of {what}, {rule}")

    @property
    def form(self) -> tuple[Form, Any] | None:
        """The form of the text, with the option that describes it."""
        found = ((name, getattr(self, name)) for name in FORMS)
        return next((one for one in found if one[1] is not None), None)

    def drawing(self) -> tuple[Sample, jax.Array]:
        """Return a sampler and its key; without a sampler, one that takes the likeliest tokens."""
        if self.key is not None and self.sampler is None:
            raise ValueError("key is given without a sampler: nothing is drawn, give Sample()")
        if self.sampler is None or isinstance(self.sampler, Greedy):
            if self.samples is not None:
                rule = "needs a sampler that draws, such as Sample(), and a key"
                raise ValueError(f"samples is {self.samples}: {rule}")
            # A text writer draws always; at temperature 0 the likeliest token has probability 1.
            return Sample(Temperature(0.0)), jax.random.key(0)
        if self.key is None:
            raise ValueError(f"key is None: {self.sampler!r} draws random numbers")
        return self.sampler, self.key
