"""Run the tasks of EleutherAI's lm-eval on a model, with the numbers of its Hugging Face backend.

    import lm_eval
    from transformer_jax.text.lm_eval import TransformerJaxLM

    lm_eval.simple_evaluate(model=TransformerJaxLM("FOLDER_OR_ID"), tasks=["lambada_openai"])

lm-eval's own command, with this model beside its others (`pip install 'transformer_jax[lm-eval]'`):

    python -m transformer_jax.text.lm_eval run --model transformer_jax \
        --model_args pretrained=FOLDER_OR_ID --batch_size 16 --tasks lambada_openai
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never

import jax
import numpy as np

from transformer_jax.checks import INT32, check_count
from transformer_jax.config import ConfigError, DType
from transformer_jax.config.keywords import refuse_keywords
from transformer_jax.decoding.completion import known_ids, longest_text, shortened
from transformer_jax.decoding.continuous_batching import Batcher, Request
from transformer_jax.decoding.samplers import MinP, Sample, Temperature, TopK, TopP
from transformer_jax.decoding.slots import init_slots
from transformer_jax.decoding.step import make_step
from transformer_jax.decoding.writer import check_stop_strings
from transformer_jax.loading import Which
from transformer_jax.models.factory import build, init_decode_state
from transformer_jax.models.quantized import Kind as WeightKind
from transformer_jax.text.continuations import ScoringRequest, score_requests
from transformer_jax.text.language_model import LanguageModel, load
from transformer_jax.tokenizers.pretrained import Message, PretrainedTokenizer
from transformer_jax.tokenizers.special import encode_text, plain, special_ids
from transformer_jax.tokenizers.utf8 import DataError

NAME = "transformer_jax"
"""The model's name for lm-eval's `--model`."""
DEFAULT_LENGTH = 2048
"""Tokens that a model without a longest text reads at a time, as lm-eval's backend has it."""
STEPS = 8
"""Tokens that each text gets between two looks for a stop string."""
COUNTS = "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"
"""How a task may call the most tokens of a text; the first that is given counts."""

GOES_ON = "\0goes on "
"""Marks where the last message ends; a template that strips messages takes its space away."""

log = logging.getLogger(__name__)


def _base() -> Any:
    """Return lm-eval's class of models; without lm-eval a plain one, which refuses to be made."""
    try:
        from lm_eval.api.model import TemplateLM
    except ModuleNotFoundError as error:
        # A module that lm-eval itself lacks is an error of its own.
        if error.name != "lm_eval":
            raise
        return object
    return TemplateLM


_Base: Any = _base()


@dataclass(frozen=True)
class Generation:
    """Settings with which the texts of a task are written.

    Attributes:
        until: texts before the first of which a text ends.
        num_tokens: the most tokens of a text.
        sampler: how a token is chosen.
    """

    until: tuple[str, ...]
    num_tokens: int
    sampler: Sample


def read_generation(given: Mapping[str, Any], num_tokens: int) -> Generation:
    """Return the generation of a task's `generation_kwargs`; ConfigError for what is not known.

    Args:
        given: `until`, `max_gen_toks` (or another of `COUNTS`), `do_sample`, `temperature`,
            `top_k`, `top_p` and `min_p`. Without `do_sample`, a temperature above 0 draws.
        num_tokens: the most tokens of a text where nothing is said.
    """
    left = dict(given)
    until = left.pop("until", None)
    # Tasks spell it in several ways; the first of `COUNTS` wins, and the others are read, too.
    counts = [value for name in COUNTS if (value := left.pop(name, None)) is not None]
    count = int(counts[0]) if counts else num_tokens
    check_count("max_gen_toks", count, 1)
    temperature = float(left.pop("temperature", None) or 0.0)
    draws = left.pop("do_sample", None)
    draws = temperature > 0 if draws is None else bool(draws)
    if draws and not temperature > 0:
        raise ConfigError(f"temperature is {temperature}: do_sample needs one above 0")
    chosen: list[Any] = [Temperature(temperature if draws else 0.0)]
    for name, kind in dict(top_k=TopK, top_p=TopP, min_p=MinP).items():
        # A task that does not draw may name these all the same: they change nothing then.
        if (value := left.pop(name, None)) is not None and draws:
            chosen.append(kind(value))
    if left:
        name, value = next(iter(left.items()))
        rule = f"must be until, {', '.join(COUNTS)}, do_sample, temperature, top_k, top_p or min_p"
        raise ConfigError(f"generation_kwargs have {name}={value!r:.40}: {rule}")
    texts = [text for text in ([until] if isinstance(until, str) else until or ()) if text]
    return Generation(check_stop_strings(texts), count, Sample(*chosen))


def rolling_windows(ids: Sequence[int], prefix: int, longest: int) -> list[ScoringRequest]:
    """Return requests that score each id once, of which none reads more than `longest` tokens.

    The first follows the token `prefix`; each later one begins after a token of the one before it.
    The last has as many tokens before it as fit. Of ids 0 to 9 and `longest` 4:

        prefix | 0 1 2 3     3 | 4 5 6 7     5 6 7 | 8 9
    """
    found = []
    for start in range(0, len(ids), longest):
        end = min(start + longest, len(ids))
        # The last window is short, so more tokens fit before it: it overlaps the one before.
        before = ids[max(0, end - longest - 1) : start] if start else [prefix]
        found.append(ScoringRequest(tuple(before), tuple(ids[start:end])))
    return found


def cut_at(text: str, until: Iterable[str]) -> str:
    """Return a text up to where the first of these begins, of that up to the next, and so on."""
    for stop in until:
        text = text.split(stop)[0]
    return text


class TransformerJaxLM(_Base):
    """Model of lm-eval; see the module's docstring.

    Args:
        pretrained: what `load` takes, or what it gave.
        batch_size: rows that are read or written side by side, at least 1.
        max_length: the most tokens that are read at a time; None is the model's max_len.
        max_gen_toks: the most tokens of a text, where a task says nothing.
        add_bos_token: whether what begins every text stands before each context; None is as the
            tokenizer does by itself, as in lm-eval's own backend.
        dtype: of a published model, as `load` takes it.
        weights: as `load` takes it.
        checkpoint: of a run, as `load` takes it.
        seed: of texts that are drawn.
        device: lm-eval's command always gives one, which is not read: JAX chooses, and
            JAX_PLATFORMS says from which.

    Raises:
        ModuleNotFoundError: if lm-eval is not installed.
        ConfigError: if an argument is wrong, or the model does not go on with a text.
    """

    backend = "causal"

    def __init__(
        self,
        pretrained: LanguageModel | str | Path,
        *,
        batch_size: int | str = 8,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        dtype: DType | None = None,
        weights: WeightKind | None = None,
        checkpoint: Which | None = None,
        seed: int = 0,
        device: str | None = None,
        **unknown: Never,
    ) -> None:
        if _Base is object:
            raise ModuleNotFoundError(
                "lm-eval is not installed: pip install 'transformer_jax[lm-eval]'"
            )
        refuse_keywords(type(self).__init__, unknown)
        super().__init__()
        if device is not None:
            log.info("device %s is not read: JAX runs on %s", device, jax.default_backend())
        options: dict[str, Any] = dict(dtype=dtype, weights=weights, checkpoint=checkpoint)
        if isinstance(pretrained, LanguageModel):
            for name, value in options.items():
                if value is not None:
                    raise ConfigError(f"{name} is {value!r}: the model is loaded already")
        else:
            pretrained = load(pretrained, **options)
        if pretrained.kind not in ("text", "chat"):
            raise ConfigError(f"lm-eval: {pretrained.instead()}")
        rows = int(batch_size) if str(batch_size).isdecimal() else batch_size
        check_count("batch_size", rows, 1)  # type: ignore[arg-type]
        check_count("max_gen_toks", max_gen_toks, 1)
        most = longest_text(pretrained.config)
        if max_length is not None:
            check_count("max_length", max_length, 2, most)
        self.model, self.rows, self.seed = pretrained, int(rows), seed
        # A recurrent model reads any length, for which no window can be made.
        self.max_length = min(most, DEFAULT_LENGTH if most > INT32.max // 4 else most)
        self.max_length = self.max_length if max_length is None else max_length
        self.max_gen_toks, self.add_bos_token = max_gen_toks, add_bos_token

    @property
    def batch_size(self) -> int:
        """Return how many rows are read side by side."""
        return self.rows

    @property
    def eot_token_id(self) -> int | None:
        """Return the token that ends a text, if there is one."""
        own = special_ids(self.model.tokenizer)
        return own.get("eos", next(iter(self.model.model.stop_ids), None))

    @property
    def prefix_token_id(self) -> int:
        """Return the token that an empty context is read as: <bos>, else <eos>."""
        if self.model.model.begin_id is not None:
            return self.model.model.begin_id
        own = plain(self.model.tokenizer)
        named = own.special_ids if isinstance(own, PretrainedTokenizer) else {}
        found = named.get("bos", named.get("eos"))
        return int(self.model.read("")[-1]) if found is None else found

    @property
    def tokenizer_name(self) -> str:
        """Return a name of the tokenizer, under which lm-eval keeps requests."""
        return self.model.name.replace("/", "__")

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **unused: Any,
    ) -> list[int]:
        """Return the ids of a text, in which a special token that it spells out is read as one."""
        own, begin = plain(self.model.tokenizer), self.model.model.begin_id
        adds = self.add_bos_token if add_special_tokens is None else add_special_tokens
        published = isinstance(own, PretrainedTokenizer)
        # A text that spells it out, as a rendered chat template does, must not get a second one.
        if add_special_tokens is None and published and string.startswith(self._prefix_text):
            adds = False
        adds = adds is not False
        if isinstance(own, PretrainedTokenizer):
            ids = own.encode(string, special_tokens=adds and begin is None)
        else:
            ids = encode_text(own, string)
        found = [*([begin] if adds and begin is not None else []), *map(int, ids)]
        self.model.known(np.array(found, np.int32), "the text")
        # From the left: lm-eval cuts contexts, and what is asked stands at their end.
        return found[-left_truncate_len:] if left_truncate_len else found

    @property
    def _prefix_text(self) -> str:
        """Return how the token before an empty context is spelled, or what no text begins with."""
        own = plain(self.model.tokenizer)
        roles = dict(own.roles) if isinstance(own, PretrainedTokenizer) else {}
        return roles.get("bos", roles.get("eos", "\0\0"))

    def tok_decode(self, tokens: int | Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return ids as a text."""
        ids = [tokens] if isinstance(tokens, int) else [*tokens]
        own = self.model.tokenizer
        if isinstance(own, PretrainedTokenizer):
            return own.decode(ids, skip_special_tokens=skip_special_tokens)
        return own.decode(ids)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]],
        disable_tqdm: bool = False,
        **unused: Any,
    ) -> list[tuple[float, bool]]:
        given = []
        for texts, context, continuation in requests:
            if not continuation:
                rule = "must have a token of its own after the context"
                raise DataError(f"continuation is {texts and texts[1]!r:.60}: {rule}")
            given.append(
                ScoringRequest(tuple(context or [self.prefix_token_id]), tuple(continuation))
            )
        answers = self._scored(given, disable_tqdm)
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _scored(
        self, given: Sequence[ScoringRequest], disable_tqdm: bool
    ) -> list[tuple[float, bool]]:
        from tqdm import tqdm

        with tqdm(total=len(given), disable=disable_tqdm, desc="loglikelihood requests") as bar:
            found = score_requests(
                self.model, given, self.rows, longest=self.max_length, report=bar.update
            )
        return [(one.log_prob, one.is_likeliest) for one in found]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return log p of each text, read in windows; see `rolling_windows`."""
        begins = None if self.model.model.begin_id is None else False  # the prefix is that token
        parts = [
            rolling_windows(
                self.tok_encode(request.args[0], begins), self.prefix_token_id, self.max_length
            )
            for request in requests
        ]
        scores = iter(self._scored([one for part in parts for one in part], disable_tqdm))
        found = [float(sum(next(scores)[0] for _ in part)) for part in parts]
        for request, value in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return what follows each context, up to one of its task's stop strings."""
        from tqdm import tqdm

        # Requests of one kind of generation share a program; a task may have several kinds.
        groups: dict[str, list[int]] = {}
        for n, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(n)
        found: dict[int, str] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="generate_until requests") as bar:
            for numbers in groups.values():
                given = read_generation(requests[numbers[0]].args[1], self.max_gen_toks)
                most = self.max_length - given.num_tokens
                if most < 1:
                    rule = f"must be below max_length {self.max_length}"
                    raise ConfigError(f"max_gen_toks is {given.num_tokens}: {rule}")
                prompts = {n: self._prompt(requests[n].args[0], most) for n in numbers}
                for n, text in self._written(prompts, given):
                    found[n] = text
                    self.cache_hook.add_partial("generate_until", requests[n].args, text)
                    bar.update(1)
        return [found[n] for n in range(len(requests))]

    def _prompt(self, context: str, most: int) -> list[int]:
        """Return the last ids of a context, at most so many, and at least one."""
        return self.tok_encode(context)[-most:] or [self.prefix_token_id]

    def _written(
        self, prompts: Mapping[int, Sequence[int]], given: Generation
    ) -> Iterable[tuple[int, str]]:
        """Yield the number of a prompt and the text after it, as each is done, longest first."""
        model, own = self.model, self.model.tokenizer
        end = self.eot_token_id
        stop_ids = tuple({*model.model.stop_ids, *([] if end is None else [end])})
        until = given.until
        # lm-eval's own backend also ends at the text of the token that ends texts.
        if end is not None and isinstance(own, PretrainedTokenizer):
            until = (*until, *filter(None, [own.decode([end])]))
        room = max(map(len, prompts.values())) + given.num_tokens
        config: Any = shortened(model.config, room)
        capacity = room if config.max_len is None else min(room, config.max_len)
        empty = init_decode_state(config, None, 1, capacity)
        key = jax.random.key(self.seed)
        requests = (
            Request(
                ids, given.num_tokens, key=jax.random.fold_in(jax.random.fold_in(key, n), 0), id=n
            )
            # The longest first, so that a cache that does not fit fails at once.
            for n, ids in sorted(prompts.items(), key=lambda one: -len(one[1]))
        )
        slots = init_slots(
            make_step(build(config)), model.params, empty, min(self.rows, len(prompts)), capacity,
            sampler=Sample(*known_ids(config, own), *given.sampler.processors),
            processors=model.model.processors, stop=stop_ids,
        )  # fmt: skip
        batcher = Batcher(slots, model.params, requests, empty, steps=STEPS)
        tokens: dict[int, list[int]] = {n: [] for n in prompts}
        for part in batcher:
            mine = tokens[part.id]
            mine += part.tokens.tolist()
            # Decoded whole each time: a token may be a part of a character, or bring a space.
            text = self.tok_decode([token for token in mine if token not in stop_ids])
            is_cut = any(stop in text for stop in until)
            if part.error is not None and not is_cut:
                raise ValueError(f"prompt {part.id}: {part.error}")
            if is_cut or part.end is not None:
                batcher.drop(part.id)
                yield part.id, cut_at(text, until)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the chat template of that name, or the usual one; None for False."""
        if chat_template is False or chat_template is None:
            return None
        own = plain(self.model.tokenizer)
        found = dict(own.chat_templates) if isinstance(own, PretrainedTokenizer) else {}
        name = chat_template if isinstance(chat_template, str) and len(found) > 1 else "default"
        if name not in found:
            have = ", ".join(sorted(found)) or "none"
            raise ConfigError(f"chat_template is {chat_template!r}: {self.model.name!r} has {have}")
        return found[name]

    def apply_chat_template(
        self, chat_history: Sequence[Message], add_generation_prompt: bool = True
    ) -> str:
        """Return messages as the model was trained to read them.

        Without `add_generation_prompt` the text ends in the last message, which is gone on with.
        Where the template refuses a system message, the messages are read without it.
        """
        own = plain(self.model.tokenizer)
        if not isinstance(own, PretrainedTokenizer) or not own.chat_templates:
            raise ConfigError(f"apply_chat_template: {self.model.name!r} has no chat template")
        messages = [dict(message) for message in chat_history]
        if not add_generation_prompt:
            messages[-1]["content"] += GOES_ON
        try:
            text = own.chat(messages, add_generation_prompt=add_generation_prompt)
        except DataError as error:
            # Templates such as Gemma's raise an error of their own for a system message.
            kept = [one for one in messages if one.get("role") != "system"]
            if len(kept) == len(messages):
                raise
            log.warning("the chat template refuses system messages, which are left out: %s", error)
            text = own.chat(kept, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        # Everything after the mark is what the template puts behind a message.
        before, mark, after = text.rpartition(GOES_ON.strip())
        return before if not mark or after.startswith(" ") else before.rstrip()


if _Base is not object:
    from lm_eval.api.registry import register_model

    register_model(NAME)(TransformerJaxLM)

if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
