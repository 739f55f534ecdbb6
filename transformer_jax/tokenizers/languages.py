"""Source and target languages of published translation models.

mBART, M2M-100 and NLLB have a token for each language. The tokenizer adds the token of the source
language to each source, and each target begins with the token of the target language.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

from transformer_jax.tokenizers.hf_files import around
from transformer_jax.tokenizers.pretrained import TARGET_IDS, PretrainedTokenizer, canonical
from transformer_jax.tokenizers.utf8 import DataError

START, FORCED_BOS, _ = TARGET_IDS


def with_languages(tokenizer: PretrainedTokenizer, source: str, target: str) -> PretrainedTokenizer:
    """Return a tokenizer for translation from one language to another.

    If targets of the model start with a language token (mBART), they start with `target`. If they
    start with another token (mBART-50, M2M-100, NLLB), `target` is forced after it.

    Args:
        tokenizer: the tokenizer of an encoder-decoder, with `target_ids`.
        source: the token of the source language, such as "en_XX", "__en__" or "eng_Latn".
        target: the token of the target language.

    Raises:
        DataError: if the tokenizer does not add a language token to text, or if it lacks one of
            these tokens.
    """
    languages = tokenizer.languages
    names = {i: name for name, i in languages.items()}
    texts = dict(tokenizer.roles)
    roles = {i: texts[role] for role, i in tokenizer.special_ids.items()}
    first, last = tokenizer.frame
    frame, ids = {*first, *last}, dict(tokenizer.target_ids)
    if (
        len(names.keys() & frame) != 1
        or not frame <= names.keys() | roles.keys()
        or START not in ids
    ):
        raise DataError("languages: this tokenizer does not add a language token to each text")
    for side, name in (("source", source), ("target", target)):
        if name not in languages:
            raise DataError(f"{side} is {name!r}: must be one of {', '.join(languages):.300}")
    ids[START if ids[START] in names else FORCED_BOS] = languages[target]

    def tokens(frame_ids: Iterable[int]) -> list[str]:
        return [source if i in names else roles[i] for i in frame_ids]

    all_ids = {**languages, **{token: i for i, token in roles.items()}}
    template = around(all_ids, tokens(first), tokens(last))
    definition = json.loads(tokenizer.definition) | {"post_processor": template}
    return replace(
        tokenizer, definition=canonical(definition), target_ids=tuple(sorted(ids.items()))
    )
