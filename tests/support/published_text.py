"""Folders of small trained models of `transformers` with their tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tokenizers.pre_tokenizers import ByteLevel  # noqa: E402

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

SIZES: dict[str, Any] = dict(
    d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=23, decoder_ffn_dim=23, max_position_embeddings=131,
    dropout=0.0,
)  # fmt: skip
ENCODER: dict[str, Any] = dict(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=23,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip


def sentence_pieces(*before: str) -> list[tuple[str, float]]:
    """Return pieces with scores: letters, doubled letters, and letters with the word mark."""
    pieces = [f"\u2581{c}" for c in ascii_lowercase] + [f"{c}{c}" for c in ascii_lowercase]
    letters = [*ascii_lowercase, "\u2581", *".,'!?0123456789"]
    return [
        *((token, 0.0) for token in before),
        *((letter, -3.0) for letter in letters),
        *((piece, -2.5) for piece in pieces),
    ]


def byte_letters(*before: str) -> dict[str, int]:
    return {token: i for i, token in enumerate([*before, *sorted(ByteLevel.alphabet())])}


def word_pieces() -> dict[str, int]:
    letters = [*ascii_lowercase, *".,'!?0123456789", "\u00e9"]
    before = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return {t: i for i, t in enumerate([*before, *letters, *(f"##{c}" for c in letters)])}


ANGLES = "<s>", "<pad>", "</s>", "<unk>", "<mask>"


def t5_tokenizer() -> Any:
    return transformers.T5Tokenizer(vocab=sentence_pieces("<pad>", "</s>", "<unk>"), extra_ids=0)


def bart_tokenizer() -> Any:
    return transformers.BartTokenizer(vocab=byte_letters(*ANGLES), merges=[])


def marian_tokenizer() -> Any:
    """Return a tokenizer like Marian's, which itself needs SentencePiece: pieces, then </s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    pieces = [*sentence_pieces("</s>", "<unk>"), ("<pad>", 0.0)]
    library = Tokenizer(models.Unigram(pieces, unk_id=1))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", 0)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )


def t5(tokenizer: Any) -> Any:
    sizes = dict(d_model=16, d_kv=8, d_ff=23, num_layers=1, num_heads=2, dropout_rate=0.0)
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0, **sizes)
    )


def bart(tokenizer: Any) -> Any:
    ids = dict(vocab_size=len(tokenizer), forced_bos_token_id=0)
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**ids, **SIZES))


def marian(tokenizer: Any) -> Any:
    pad = tokenizer.pad_token_id
    ids = dict(vocab_size=len(tokenizer), pad_token_id=pad, decoder_start_token_id=pad)
    config = transformers.MarianConfig(**ids, **SIZES, eos_token_id=0, forced_eos_token_id=0)
    model = transformers.MarianMTModel(config)
    model.generation_config.bad_words_ids = [
        [pad]
    ]  # its logit is untrained, as in published models
    return model


SEQ2SEQ: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "t5": (t5_tokenizer, t5), "bart": (bart_tokenizer, bart), "marian": (marian_tokenizer, marian),
}  # fmt: skip


def trained(model: Any, batch: dict[str, Any], loss: float = 0.02) -> Any:
    """Train on one batch, with the loss that the model computes, until it is below `loss`."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    model.train()
    for step in range(600):
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step / 100)
        optimizer.zero_grad()
        found = model(**batch).loss
        found.backward()
        optimizer.step()
        if float(found.detach()) < loss:
            return model.eval()
    raise AssertionError(f"loss is {float(found.detach())} after 600 steps")


def torch_batch(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    sources = tokenizer([source for source, _ in pairs], return_tensors="pt", padding=True)
    targets = tokenizer(text_target=[t for _, t in pairs], return_tensors="pt", padding=True)
    labels = targets.input_ids.masked_fill(targets.attention_mask == 0, -100)
    mask = sources.attention_mask
    return dict(input_ids=sources.input_ids, attention_mask=mask, labels=labels)


def saved(folder: Path, model: Any, tokenizer: Any) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def bert_tokenizer() -> Any:
    return transformers.BertTokenizer(vocab=word_pieces())


def roberta_tokenizer() -> Any:
    return transformers.RobertaTokenizer(vocab=byte_letters(*ANGLES), merges=[])


def distilbert_tokenizer() -> Any:
    return transformers.DistilBertTokenizer(vocab=word_pieces())


def encoder(name: str, tokenizer: Any, **options: Any) -> Any:
    """Return a model of this class of `transformers`, with all parameters random."""
    sizes: dict[str, Any] = dict(vocab_size=len(tokenizer), max_position_embeddings=131, **options)
    if name.startswith("DistilBert"):
        sizes |= dict(dim=16, n_layers=1, n_heads=2, hidden_dim=23, dropout=0.0)
        sizes |= dict(attention_dropout=0.0, seq_classif_dropout=0.0)
        config = transformers.DistilBertConfig(**sizes)
    elif name.startswith("Roberta"):
        config = transformers.RobertaConfig(**sizes, **ENCODER, type_vocab_size=1)
    else:
        config = transformers.BertConfig(**sizes, **ENCODER)
    torch.manual_seed(5)
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model.eval()


ENCODERS: dict[str, Callable[[], Any]] = {
    "Bert": bert_tokenizer, "Roberta": roberta_tokenizer, "DistilBert": distilbert_tokenizer,
}  # fmt: skip
