"""Use the model of a run on texts that are typed: do with each what the run was trained for."""

from __future__ import annotations

from collections.abc import Sequence

from transformer_jax.config import ConfigError, TrainConfig
from transformer_jax.config.tasks import ChatTask, ClassifyTask, MaskedTask, PreferenceTask
from transformer_jax.training.batch import Params
from transformer_jax.training.tasks.answers import answer_sources
from transformer_jax.training.tasks.chat import answer_messages
from transformer_jax.training.tasks.classify import label_texts
from transformer_jax.training.tasks.masked import fill_masks
from transformer_jax.training.tasks.preferences import answer_preferred
from transformer_jax.training.tasks.task import Tokenizers


def answer_prompts(
    config: TrainConfig,
    tokenizers: Tokenizers,
    params: Params,
    texts: Sequence[str],
    *,
    beams: int | None = None,
    num_tokens: int | None = None,
) -> list[str]:
    """Do with each text what a run's task is: translate, fill masks, label, or answer a message.

    ConfigError for `beams` where the task has none.
    """
    task = config.task
    if beams is not None and isinstance(
        task, MaskedTask | ClassifyTask | ChatTask | PreferenceTask
    ):
        raise ConfigError(f"beams is {beams}: task {task.kind!r} has no search")
    match task:
        case MaskedTask():
            return [fill_masks(config, tokenizers, params, text) for text in texts]
        case ClassifyTask():
            said = label_texts(config, tokenizers, params, texts)
            return [f"{label} {probability:.3f}" for label, probability in said]
        case ChatTask():
            return [
                answer_messages(
                    config, tokenizers, params, [{"role": "user", "content": text}], number,
                    num_tokens or 400,
                )
                for number, text in enumerate(texts)
            ]  # fmt: skip
        case PreferenceTask():
            return [
                answer_preferred(
                    config, tokenizers.tokenizer, params, text, number, num_tokens or 400
                )
                for number, text in enumerate(texts)
            ]
    return answer_sources(config, tokenizers, params, texts, beams=beams, num_tokens=num_tokens)
