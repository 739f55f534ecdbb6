"""Generation options, whose fields are the keyword arguments of `generate` and `chat`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypedDict

import jax

from transformer_jax import checks
from transformer_jax.cache.kv_cache import check_cache_dtype
from transformer_jax.config import ConfigError
from transformer_jax.config.keywords import config_class, refuse_keywords
from transformer_jax.decoding.logit_processors import HistoryProcessor, check_processors
from transformer_jax.decoding.samplers import Greedy, Sample, Temperature
from transformer_jax.decoding.structured import Form
from transformer_jax.decoding.writer import check_stop_strings


class Options(TypedDict, total=False):
    """Keyword arguments of `generate`, `chat` and `search`, for type checkers."""

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
"""Options that constrain the form of the text. At most one of them may be set."""

CHATS = (
    "stop", "stream", "sampler", "key", "processors", "samples", "slots", "cache_dtype", *FORMS,
)  # fmt: skip
"""Options for `chat`."""

GENERATES = *CHATS, "beams"
"""Options for `generate`."""

SEARCHES = "processors", "cache_dtype", "beams", "results", "length_penalty"
"""Options for `search`."""

LOOKS_UP = "stop", "sampler", "key", "processors", "cache_dtype"
"""Options for `look_up`."""


@config_class
class GenerateOptions:
    """Generation options, which are the keyword arguments of `generate`, `chat` and `search`.

    Raises ValueError if a value has the wrong type or is out of range, or if two options are
    incompatible. Raises TypeError, with a suggestion, for an unknown option.
    """

    num_tokens: int | None = None
    """Maximum number of new tokens, at least 1. None means 400 or, for a run on pairs, the trained
    length. If the text exceeds `max_len`, the model re-reads the last half and continues. Beam
    searches and `samples` must fit in `max_len`, and None limits them to `max_len`."""
    stop: str | Sequence[str] = ()
    """A string or a list of strings. The text ends before the first string that occurs."""
    stream: bool = False
    """Return an iterator of pieces. Each piece is available as soon as no later token can change
    it."""
    sampler: Greedy | Sample | None = None
    """How to choose each token. None chooses the likeliest token, and a `Sample` needs a `key`."""
    key: jax.Array | None = None
    """A single `jax.random.key`. Text n of a list is sampled with `fold_in(key, n)`."""
    processors: Sequence[HistoryProcessor] = ()
    """Functions that change the logits before a token is chosen."""
    beams: int | None = None
    """Width of a beam search, which returns the best text. None disables beam search."""
    results: int = 1
    """Number of texts that a beam search returns, from 1 to `beams`."""
    length_penalty: float | None = None
    """Exponent alpha in the score of a beam search, log p / length^alpha. A value of 0 favors short
    texts. None means 1 for a run on pairs, as in its evaluation, and 0 otherwise."""
    samples: int | None = None
    """Number of texts to sample for one prompt, as a list. None generates a single text."""
    slots: int = 8
    """Maximum number of texts to generate at a time for a list of prompts."""
    cache_dtype: jax.typing.DTypeLike | None = None
    """Data type of the cached keys and values. None means the compute dtype."""
    schema: Mapping[str, Any] | None = None
    """JSON schema that the text satisfies. The options `schema`, `regex` and `grammar` need `pip
    install 'transformer_jax[structured]'`, and at most one of them may be set."""
    regex: str | None = None
    """Regular expression, in Rust's syntax, that the whole text matches."""
    grammar: str | None = None
    """Grammar, in llguidance's variant of Lark's syntax, that the text matches."""

    def __post_init__(self) -> None:
        for name in ("beams", "results", "samples", "slots"):
            value = getattr(self, name)
            if value is not None or name in ("results", "slots"):
                checks.check_count(name, value, 1)
        if self.num_tokens is not None:
            checks.check_count("num_tokens", self.num_tokens, 1, checks.INT32.max)
        if not isinstance(self.stream, bool):
            raise ValueError(f"stream is {self.stream!r:.80}: must be True or False")
        if self.length_penalty is not None:
            if isinstance(self.length_penalty, bool):
                raise ValueError(f"length_penalty is {self.length_penalty}: must be a number")
            checks.check_finite("length_penalty", self.length_penalty)
            if self.beams is None:
                raise ValueError(f"length_penalty is {self.length_penalty}: needs beams")
        if self.results > (self.beams or 1):
            raise ValueError(f"results is {self.results}: must be at most beams, {self.beams or 1}")
        if self.stream and self.samples is not None:
            raise ValueError("pass only one of stream and samples")
        if self.sampler is not None and not isinstance(self.sampler, Greedy | Sample):
            raise ValueError(f"sampler is {self.sampler!r:.80}: must be Greedy() or a Sample(...)")
        if self.key is not None:
            checks.check_key("key", self.key)
        if self.cache_dtype is not None:
            check_cache_dtype("cache_dtype", self.cache_dtype)
        forms = [name for name in FORMS if getattr(self, name) is not None]
        for name in forms:
            value = getattr(self, name)
            if not isinstance(value, Mapping if name == "schema" else str):
                rule = "an object, such as a dict" if name == "schema" else "a string"
                raise ValueError(f"{name} is {value!r:.80}: must be {rule}")
        if len(forms) > 1:
            raise ValueError(f"pass only one of {forms[0]} and {forms[1]}")
        # Convert a single stop string to a tuple, so that equivalent options compare equal.
        object.__setattr__(self, "stop", check_stop_strings(self.stop))
        object.__setattr__(self, "processors", check_processors(self.processors))

    @classmethod
    def of(
        cls,
        function: Callable[..., object],
        names: Collection[str],
        num_tokens: int | None,
        options: Mapping[str, Any],
    ) -> GenerateOptions:
        """Return the options for a call of `function`; raise TypeError for one not in `names`."""
        unknown = {name: value for name, value in options.items() if name not in names}
        refuse_keywords(function, unknown, names)
        return cls(num_tokens=num_tokens, **options)

    def check_one_prompt(self, count: int | None) -> None:
        """Raise ValueError if an option needs a single prompt, but `count` prompts are passed."""
        if count is not None and (self.stream or self.samples is not None):
            name = "stream" if self.stream else "samples"
            raise ValueError(f"{name} needs one prompt, not a list of {count}")

    def refuse(self, names: Collection[str], model: str, rule: str) -> None:
        """Raise ConfigError if one of the options is set, because the model does not support it."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # Greedy() is equivalent to no sampler. Note that `==` on an array does not return a
            # bool.
            unset = value is None or isinstance(value, Greedy)
            if not isinstance(value, jax.Array):
                unset = unset or value == field.default
            if field.name in names and not unset:
                shown = "a key" if field.name == "key" else value
                rule = f"must not be set for {model}, because {rule}"
                raise ConfigError(f"{field.name} is {shown!r:.80}: {rule}")

    @property
    def form(self) -> tuple[Form, Any] | None:
        """Name and value of the option that constrains the form, or None."""
        found = ((name, getattr(self, name)) for name in FORMS)
        return next((one for one in found if one[1] is not None), None)

    def drawing(self) -> tuple[Sample, jax.Array]:
        """Return a sampler and its key. The default sampler chooses the likeliest tokens."""
        if self.key is not None and self.sampler is None:
            rule = "needs a sampler that draws, such as sampler=Sample()"
            raise ValueError(f"key is set, but sampler is None: {rule}")
        if self.sampler is None or isinstance(self.sampler, Greedy):
            if self.samples is not None:
                rule = "needs a sampler that draws, such as Sample(), and a key"
                raise ValueError(f"samples is {self.samples}: {rule}")
            # The generator always samples. At temperature 0, the likeliest token has probability 1.
            return Sample(Temperature(0.0)), jax.random.key(0)
        if self.key is None:
            raise ValueError(f"key is None: {self.sampler!r} draws random numbers and needs one")
        return self.sampler, self.key
