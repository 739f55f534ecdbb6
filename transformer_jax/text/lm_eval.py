"""Adapter for EleutherAI's lm-eval, which returns the same results as its Hugging Face backend.

    import lm_eval
    from transformer_jax.text.lm_eval import TransformerJaxLM

    lm_eval.simple_evaluate(model=TransformerJaxLM("FOLDER_OR_ID"), tasks=["lambada_openai"])

The following command runs lm-eval with this model registered. It needs `pip install
'transformer_jax[lm-eval]'`.

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
from transformer_jax.decoding.completion import known_ids, max_text_tokens, shortened
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
"""Name of the model for lm-eval's `--model`."""
DEFAULT_LENGTH = 2048
"""Window size for a model without a maximum length, as in lm-eval's own backend."""
STEPS = 8
"""Number of tokens to generate between searches for a stop string."""
COUNTS = "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"
"""Names that tasks use for the maximum number of new tokens, in order of precedence."""

CONTINUES = "\0continues "
"""Marker at the end of the last message. Its space reveals whether the template strips messages."""

log = logging.getLogger(__name__)

_Base: Any = object  # without lm-eval, `TransformerJaxLM` raises an error
try:
    from lm_eval.api.model import TemplateLM
except ModuleNotFoundError as error:
    if error.name != "lm_eval":  # a dependency of lm-eval is missing
        raise
else:
    _Base = TemplateLM


@dataclass(frozen=True)
class Generation:
    """Generation settings of a task, with its stop strings in `until`."""

    until: tuple[str, ...]
    num_tokens: int
    sampler: Sample


def read_generation(options: Mapping[str, Any], num_tokens: int) -> Generation:
    """Parse a task's `generation_kwargs`; raise ConfigError for an unknown option.

    Args:
        options: the options `until`, `max_gen_toks` (or another name in `COUNTS`), `do_sample`,
            `temperature`, `top_k`, `top_p` and `min_p`. If `do_sample` is not set, a temperature
            above 0 enables sampling.
        num_tokens: default maximum number of new tokens.
    """
    left = dict(options)
    until = left.pop("until", None)
    # Read all names, so that none of them is reported as unknown.
    counts = [value for name in COUNTS if (value := left.pop(name, None)) is not None]
    count = int(counts[0]) if counts else num_tokens
    check_count("max_gen_toks", count, 1)
    temperature = float(left.pop("temperature", None) or 0.0)
    draws = left.pop("do_sample", None)
    draws = temperature > 0 if draws is None else bool(draws)
    if draws and not temperature > 0:
        raise ConfigError(f"temperature is {temperature}: must be above 0 if do_sample is true")
    chosen: list[Any] = [Temperature(temperature if draws else 0.0)]
    for name, kind in dict(top_k=TopK, top_p=TopP, min_p=MinP).items():
        # A task that does not sample may also set these options, but they have no effect.
        if (value := left.pop(name, None)) is not None and draws:
            chosen.append(kind(value))
    if left:
        name, value = next(iter(left.items()))
        rule = f"must be until, {', '.join(COUNTS)}, do_sample, temperature, top_k, top_p or min_p"
        raise ConfigError(f"generation_kwargs contain {name}={value!r:.40}: {rule}")
    texts = [text for text in ([until] if isinstance(until, str) else until or ()) if text]
    return Generation(check_stop_strings(texts), count, Sample(*chosen))


def rolling_windows(ids: Sequence[int], prefix: int, longest: int) -> list[ScoringRequest]:
    """Return requests of at most `longest` tokens that together score each ID once.

    The context of the first request is the token `prefix`. The context of each later request is the
    last token of the previous request, and the last request has as much context as fits. For
    example, the requests for IDs 0 to 9 and `longest` 4 are:

        prefix | 0 1 2 3     3 | 4 5 6 7     5 6 7 | 8 9
    """
    found = []
    for start in range(0, len(ids), longest):
        end = min(start + longest, len(ids))
        # A short last window has room for more context.
        before = ids[max(0, end - longest - 1) : start] if start else [prefix]
        found.append(ScoringRequest(tuple(before), tuple(ids[start:end])))
    return found


def cut_at(text: str, until: Iterable[str]) -> str:
    """Truncate text at each of the stop strings in turn."""
    for stop in until:
        text = text.split(stop)[0]
    return text


class TransformerJaxLM(_Base):
    """Model for lm-eval, as shown in the module's docstring.

    Args:
        pretrained: a loaded model, or an argument of `load`.
        batch_size: number of rows per batch, at least 1.
        max_length: maximum number of tokens to read at a time; None means `max_len` of the model.
        max_gen_toks: default maximum number of new tokens.
        add_bos_token: whether each context starts with the model's begin token; None follows the
            tokenizer, as in lm-eval's own backend.
        dtype: dtype of a published model, as in `load`.
        weights: type in which the weights are stored, as in `load`.
        checkpoint: checkpoint of a run, as in `load`.
        invariant: whether a result has the same bits for every batch, as in `load`.
        seed: random seed for sampling.
        device: ignored, because lm-eval's command always passes a device. Set JAX_PLATFORMS
            instead.

    Raises:
        ModuleNotFoundError: if lm-eval is not installed.
        ConfigError: if an argument is invalid, or the model does not continue text.
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
        invariant: bool = False,
        seed: int = 0,
        device: str | None = None,
        **unknown: Never,
    ) -> None:
        if _Base is object:
            raise ModuleNotFoundError(
                "lm-eval is not installed: run pip install 'transformer_jax[lm-eval]'"
            )
        refuse_keywords(type(self).__init__, unknown)
        super().__init__()
        if device is not None:
            log.info("device %s is ignored: JAX runs on %s", device, jax.default_backend())
        options: dict[str, Any] = dict(dtype=dtype, weights=weights, checkpoint=checkpoint)
        options["invariant"] = invariant or None
        if isinstance(pretrained, LanguageModel):
            for name, value in options.items():
                if value is not None:
                    raise ConfigError(f"{name} is {value!r}: the model is already loaded")
        else:
            pretrained = load(pretrained, **options | {"invariant": invariant})
        if pretrained.kind not in ("text", "chat"):
            raise ConfigError(f"lm-eval: {pretrained.instead()}")
        # The command of lm-eval passes a string.
        rows = int(batch_size) if str(batch_size).isdecimal() else batch_size
        check_count("batch_size", rows, 1)  # type: ignore[arg-type]
        check_count("max_gen_toks", max_gen_toks, 1)
        most = max_text_tokens(pretrained.config)
        if max_length is not None:
            check_count("max_length", max_length, 2, most)
        self.model, self.rows, self.seed = pretrained, int(rows), seed
        # A recurrent model reads text of any length, but windows need a finite size.
        self.max_length = min(most, DEFAULT_LENGTH if most > INT32.max // 4 else most)
        self.max_length = self.max_length if max_length is None else max_length
        self.max_gen_toks, self.add_bos_token = max_gen_toks, add_bos_token

    @property
    def batch_size(self) -> int:
        """Number of rows per batch."""
        return self.rows

    @property
    def eot_token_id(self) -> int | None:
        """ID of the end-of-text token, or None."""
        special = special_ids(self.model.tokenizer)
        return special.get("eos", next(iter(self.model.model.stop_ids), None))

    @property
    def prefix_token_id(self) -> int:
        """ID of the token that replaces an empty context: <bos>, or else <eos> or a newline."""
        if self.model.model.begin_id is not None:
            return self.model.model.begin_id
        base = plain(self.model.tokenizer)
        special = base.special_ids if isinstance(base, PretrainedTokenizer) else {}
        found = special.get("bos", special.get("eos"))
        return int(self.model.read("")[-1]) if found is None else found

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, which lm-eval uses as a key to cache requests."""
        return self.model.name.replace("/", "__")

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **unused: Any,
    ) -> list[int]:
        """Return the token IDs of a string, including the special tokens that it spells out."""
        base, begin = plain(self.model.tokenizer), self.model.model.begin_id
        adds = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if isinstance(base, PretrainedTokenizer):
            # A formatted chat may already start with the begin token, so do not add a second one.
            roles = dict(base.roles)
            prefix = roles.get("bos", roles.get("eos"))
            if add_special_tokens is None and prefix is not None and string.startswith(prefix):
                adds = False
            ids = base.encode(string, special_tokens=adds is not False and begin is None)
        else:
            ids = encode_text(base, string)
        found = [*([begin] if adds is not False and begin is not None else []), *map(int, ids)]
        self.model.known(np.array(found, np.int32), "the text")
        # Truncate on the left, because the question is at the end of the context.
        return found[-left_truncate_len:] if left_truncate_len else found

    def tok_decode(self, tokens: int | Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token IDs."""
        ids = [tokens] if isinstance(tokens, int) else [*tokens]
        tokenizer = self.model.tokenizer
        if isinstance(tokenizer, PretrainedTokenizer):
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return tokenizer.decode(ids)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]],
        disable_tqdm: bool = False,
        **unused: Any,
    ) -> list[tuple[float, bool]]:
        parsed = []
        for texts, context, continuation in requests:
            if not continuation:
                rule = "must add at least one token to the context"
                raise DataError(f"continuation is {texts and texts[1]!r:.60}: {rule}")
            parsed.append(
                ScoringRequest(tuple(context or [self.prefix_token_id]), tuple(continuation))
            )
        answers = self._score(parsed, disable_tqdm)
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                # lm-eval stores these results, so that an interrupted evaluation can continue.
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _score(
        self, requests: Sequence[ScoringRequest], disable_tqdm: bool
    ) -> list[tuple[float, bool]]:
        from tqdm import tqdm

        with tqdm(total=len(requests), disable=disable_tqdm, desc="loglikelihood requests") as bar:
            found = score_requests(
                self.model, requests, self.rows, longest=self.max_length, report=bar.update
            )
        return [(one.log_prob, one.is_likeliest) for one in found]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return log p of each text, which is read in the windows from `rolling_windows`."""
        begins = None if self.model.model.begin_id is None else False  # it is the prefix
        parts = [
            rolling_windows(
                self.tok_encode(request.args[0], begins), self.prefix_token_id, self.max_length
            )
            for request in requests
        ]
        scores = iter(self._score([one for part in parts for one in part], disable_tqdm))
        found = [float(sum(next(scores)[0] for _ in part)) for part in parts]
        for request, value in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context up to a stop string of its task."""
        from tqdm import tqdm

        # Requests with the same settings share a program, but a task may have several settings.
        groups: dict[str, list[int]] = {}
        for n, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(n)
        found: dict[int, str] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="generate_until requests") as bar:
            for numbers in groups.values():
                settings = read_generation(requests[numbers[0]].args[1], self.max_gen_toks)
                most = self.max_length - settings.num_tokens
                if most < 1:
                    rule = f"must be below max_length, {self.max_length}"
                    raise ConfigError(f"max_gen_toks is {settings.num_tokens}: {rule}")
                prompts = {
                    n: self.tok_encode(requests[n].args[0])[-most:] or [self.prefix_token_id]
                    for n in numbers
                }
                for n, text in self._generate(prompts, settings):
                    found[n] = text
                    self.cache_hook.add_partial("generate_until", requests[n].args, text)
                    bar.update(1)
        return [found[n] for n in range(len(requests))]

    def _generate(
        self, prompts: Mapping[int, Sequence[int]], settings: Generation
    ) -> Iterable[tuple[int, str]]:
        """Yield the index and the continuation of each prompt, longest prompts first."""
        model, tokenizer = self.model, self.model.tokenizer
        end = self.eot_token_id
        stop_ids = tuple({*model.model.stop_ids, *([] if end is None else [end])})
        until = settings.until
        # lm-eval's own backend also stops at the text of the end token.
        if end is not None and isinstance(tokenizer, PretrainedTokenizer):
            until = (*until, *filter(None, [tokenizer.decode([end])]))
        room = max(map(len, prompts.values())) + settings.num_tokens
        config: Any = shortened(model.config, room)
        capacity = room if config.max_len is None else min(room, config.max_len)
        empty = init_decode_state(config, None, 1, capacity)
        key = jax.random.key(self.seed)
        fold = jax.random.fold_in
        requests = (
            Request(ids, settings.num_tokens, key=fold(fold(key, n), 0), id=n)
            # Start with the longest, so that a cache that does not fit in memory fails immediately.
            for n, ids in sorted(prompts.items(), key=lambda one: -len(one[1]))
        )
        module: Any = build(config).clone(edits=model.module.edits)
        slots = init_slots(
            make_step(module), model.params, empty, min(self.rows, len(prompts)), capacity,
            sampler=Sample(*known_ids(config, tokenizer), *settings.sampler.processors),
            processors=model.model.processors, stop=stop_ids,
        )  # fmt: skip
        batcher = Batcher(slots, model.params, requests, empty, steps=STEPS)
        tokens: dict[int, list[int]] = {n: [] for n in prompts}
        for part in batcher:
            ids = tokens[part.id]
            ids += part.tokens.tolist()
            # Decode all IDs each time, because a token may be part of a character or add a space.
            text = self.tok_decode([token for token in ids if token not in stop_ids])
            is_cut = any(stop in text for stop in until)
            if part.error is not None and not is_cut:
                raise ValueError(f"prompt {part.id}: {part.error}")
            if is_cut or part.end is not None:
                batcher.drop(part.id)
                yield part.id, cut_at(text, until)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the default chat template or of a named one, or None for False."""
        if chat_template is False or chat_template is None:
            return None
        base = plain(self.model.tokenizer)
        found = dict(base.chat_templates) if isinstance(base, PretrainedTokenizer) else {}
        name = chat_template if isinstance(chat_template, str) and len(found) > 1 else "default"
        if name not in found:
            names = ", ".join(sorted(found)) or "none"
            rule = f"{self.model.name!r} has {names}"
            raise ConfigError(f"chat_template is {chat_template!r}: {rule}")
        return found[name]

    def apply_chat_template(
        self, chat_history: Sequence[Message], add_generation_prompt: bool = True
    ) -> str:
        """Return messages formatted by the model's chat template.

        If `add_generation_prompt` is false, the text ends with the last message, so that the model
        continues that message. If the template rejects system messages, they are dropped with a
        warning.
        """
        base = plain(self.model.tokenizer)
        if not isinstance(base, PretrainedTokenizer) or not base.chat_templates:
            raise ConfigError(f"apply_chat_template: {self.model.name!r} has no chat template")
        messages = [dict(message) for message in chat_history]
        if not add_generation_prompt:
            messages[-1]["content"] += CONTINUES
        try:
            text = base.chat(messages, add_generation_prompt=add_generation_prompt)
        except DataError as error:
            # Some templates, such as the one for Gemma, raise an error for a system message.
            kept = [one for one in messages if one.get("role") != "system"]
            if len(kept) == len(messages):
                raise
            log.warning("the chat template rejects system messages, which are dropped: %s", error)
            text = base.chat(kept, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        # The template appended everything after the marker to the message, so remove it.
        before, mark, after = text.rpartition(CONTINUES.strip())
        return before if not mark or after.startswith(" ") else before.rstrip()


if _Base is not object:
    from lm_eval.api.registry import register_model

    register_model(NAME)(TransformerJaxLM)

if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
