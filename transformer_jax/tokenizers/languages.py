"""Say from which language into which a published translator writes.

mBART, M2M-100 and NLLB have a token of each language. One stands around every text, and targets
begin with theirs.
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
    """Return a translator's tokenizer that reads one language and has targets of another.

    Where targets start with a language (mBART), they start with `target`; where they start with
    another token (mBART-50, M2M-100, NLLB), `target` is forced after it.

    Args:
        tokenizer: of an encoder-decoder, with `target_ids`.
        source: the token of a language, such as "en_XX", "__en__" or "eng_Latn".
        target: another.

    Raises:
        DataError: if the tokenizer puts no language around a text, or has no such token.
    """
    known = tokenizer.languages
    names = {i: name for name, i in known.items()}
    texts = dict(tokenizer.roles)
    roles = {i: texts[role] for role, i in tokenizer.special_ids.items()}
    first, last = tokenizer.frame
    put, ids = {*first, *last}, dict(tokenizer.target_ids)
    if len(names.keys() & put) != 1 or not put <= names.keys() | roles.keys() or START not in ids:
        raise DataError("languages: this tokenizer does not put the token of one around a text")
    for side, name in (("source", source), ("target", target)):
        if name not in known:
            have = ", ".join(known)
            raise DataError(f"{side} is {name!r}: must be one of {have:.300}")
    ids[START if ids[START] in names else FORCED_BOS] = known[target]

    def tokens(given: Iterable[int]) -> list[str]:
        return [source if i in names else roles[i] for i in given]

    all_ids = {**known, **{token: i for i, token in roles.items()}}
    template = around(all_ids, tokens(first), tokens(last))
    definition = json.loads(tokenizer.definition) | {"post_processor": template}
    return replace(
        tokenizer, definition=canonical(definition), target_ids=tuple(sorted(ids.items()))
    )
