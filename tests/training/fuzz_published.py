"""Fuzzing of task rows against `transformers`, with random tokenizers, models and texts.

    python -m tests.training.fuzz_published --minutes 5 --seed 0

A case is a tokenizer of some family and a small random model, saved by `transformers` as a folder.
For many texts, the rows are compared id by id and as decoded text; for a few, also the loss or the
probabilities. `transformers` then reads the tokenizer that `convert` writes.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer, processors

from tests.support.published_text import (
    ANGLES,
    byte_letters,
    encoder,
    marian_tokenizer,
    sentence_pieces,
    torch,
    torch_batch,
    transformers,
    word_pieces,
)
from tests.support.published_text import bart as make_bart
from tests.support.published_text import marian as make_marian
from tests.support.published_text import t5 as make_t5
from transformer_jax.config import TrainConfig, fine_tuning
from transformer_jax.config.tasks import ClassifyTask, Seq2SeqTask
from transformer_jax.models.factory import init_params
from transformer_jax.text.save import tokenizer_files
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.batch import batch_logits, batch_scores
from transformer_jax.training.initial import start_model, start_params
from transformer_jax.training.rows import padded
from transformer_jax.training.tasks.classify import class_example
from transformer_jax.training.tasks.pairs import Pair, pair_example

LETTERS = [
    *"abcdefghijklmnopqrstuvwxyzABC0123456789", *" .,'!?-_<>[]/", " ", " ", "  ", "the ",
    "\u00e9", "e\u0301", "\u00df", "\u4e2d", "\U0001f600", "\u00a0", "\u2581", "##", " ' ", " n't",
    "\u200b",
]  # fmt: skip
LABELS = "down", "up"


def text(rng, longest=23):
    """Draw a text that is not empty and not a special token."""
    while True:
        found = "".join(rng.choice(LETTERS, rng.integers(1, longest)))
        if found.strip() and not any(mark in found for mark in SPECIAL):
            return found


SPECIAL = (*ANGLES, "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<extra_id_")


def around(tokenizer, template):
    """Put other tokens around a text."""
    library = tokenizer.backend_tokenizer
    ids = [(t, library.token_to_id(t)) for t in ("<s>", "</s>") if t in template]
    library.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    return tokenizer


def merges(rng):
    """Draw merges of byte letters, each of two existing tokens."""
    vocabulary, pairs = byte_letters(*ANGLES), []
    plain = [*"abcdefgthe", "\u0120"]
    for _ in range(rng.integers(0, 23)):
        one, two = rng.choice(plain, 2)
        if one + two not in vocabulary:
            vocabulary[one + two] = len(vocabulary)
            pairs.append((str(one), str(two)))
            plain.append(one + two)
    return dict(vocab=vocabulary, merges=pairs, add_prefix_space=bool(rng.integers(2)))


def t5(rng):
    extra = int(rng.choice([0, 7]))
    pieces = sentence_pieces("<pad>", "</s>", "<unk>")
    tokenizer = transformers.T5Tokenizer(vocab=pieces, extra_ids=extra)
    return tokenizer, make_t5(tokenizer)


def bart(rng):
    tokenizer = transformers.BartTokenizer(**merges(rng))
    model = make_bart(tokenizer)
    model.generation_config.forced_bos_token_id = None if rng.integers(2) else 0
    return tokenizer, model


def marian(rng):
    tokenizer = marian_tokenizer()
    templates = ["$A </s>", "$A", "</s> $A </s>"]
    tokenizer = around(tokenizer, str(rng.choice(templates)))
    return tokenizer, make_marian(tokenizer)


def bert(rng):
    kinds = ["Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification"]
    case = dict(do_lower_case=bool(rng.integers(2)), tokenize_chinese_chars=bool(rng.integers(2)))
    tokenizer = transformers.BertTokenizer(
        vocab=word_pieces(), strip_accents=[None, True, False][rng.integers(3)], **case
    )
    return tokenizer, encoder(f"Bert{rng.choice(kinds)}", tokenizer)


def roberta(rng):
    tokenizer = transformers.RobertaTokenizer(**merges(rng))
    kinds = ["Model", "ForMaskedLM", "ForSequenceClassification"]
    return tokenizer, encoder(f"Roberta{rng.choice(kinds)}", tokenizer)


def distilbert(rng):
    case = dict(do_lower_case=bool(rng.integers(2)))
    tokenizer = transformers.DistilBertTokenizer(vocab=word_pieces(), **case)
    kinds = ["Model", "ForMaskedLM", "ForSequenceClassification"]
    return tokenizer, encoder(f"DistilBert{rng.choice(kinds)}", tokenizer)


FAMILIES = [t5, bart, marian, bert, roberta, distilbert]


def wanted_labels(tokenizer, target):
    ids = tokenizer(text_target=target).input_ids
    return ids if ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]


def check_seq2seq(rng, config, tokenizers, tokenizer, model, texts):
    start = model.config.decoder_start_token_id
    pairs = []
    for number in range(texts):
        pair = Pair(text(rng), text(rng), f"line {number}")
        source, labels = tokenizer(pair.source).input_ids, wanted_labels(tokenizer, pair.target)
        row = pair_example(config, tokenizers, pair)
        assert row.source.tolist() == source, (pair, row.source.tolist(), source)
        assert row.labels.tolist() == labels, (pair, row.labels.tolist(), labels)
        assert row.tokens.tolist() == [start, *labels[:-1]], (pair, row.tokens.tolist())
        theirs = tokenizer.decode(labels, skip_special_tokens=True)
        ours = tokenizers.tokenizer.decode(row.labels, skip_special_tokens=True)
        assert ours == theirs, (pair, ours, theirs)
        pairs.append((pair, row))
    return pairs[:5]


def check_loss(config, params, tokenizer, model, pairs):
    inputs = torch_batch(tokenizer, [(pair.source, pair.target) for pair, _ in pairs])
    labels = [wanted_labels(tokenizer, pair.target) for pair, _ in pairs]
    longest = max(map(len, labels))
    inputs["labels"] = torch.tensor([row + [-100] * (longest - len(row)) for row in labels])
    with torch.no_grad():
        want = float(model(**inputs).loss)
    batch = padded([row for _, row in pairs], False)
    summed, count, _ = np.asarray(jax.jit(batch_scores(config.model))(params, batch))
    assert abs(summed / count - want) < 1e-4 * max(1.0, want), (summed / count, want)


def check_classes(rng, config, tokenizers, tokenizer, texts):
    rows = []
    for number in range(texts):
        pair = Pair(str(rng.choice(LABELS)), text(rng), f"line {number}")
        row, ids = class_example(config, tokenizers, pair), tokenizer(pair.target).input_ids
        assert row.tokens.tolist() == ids, (pair, row.tokens.tolist(), ids)
        rows.append((pair, row))
    return rows[:5]


def check_hidden(config, start, params, tokenizer, model, rows):
    """Compare the classes if the model has a head with two classes, else its first hidden state."""
    batch = padded([row for _, row in rows], True)
    inputs = tokenizer([pair.target for pair, _ in rows], return_tensors="pt", padding=True)
    with torch.no_grad():
        out = model(**inputs, output_hidden_states=True)
    if type(model).__name__.endswith("SequenceClassification"):
        got, want = batch_logits(config.model)(params, batch, None), out.logits
    else:
        from transformer_jax import build

        places = np.where(batch.valid, np.arange(batch.tokens.shape[1]), -1).astype(np.int32)
        hidden = build(config.model).apply(
            {"params": params}, batch.tokens, positions=places, method="encode"
        )
        got, want = np.asarray(hidden)[:, 0], out.hidden_states[-1][:, 0]
    np.testing.assert_allclose(np.asarray(got), want.numpy(), atol=2e-4)


def check_written(rng, tokenizers, tokenizer, vocab_size, folder):
    """Compare the tokenizer written for `transformers` with the original."""
    files, _ = tokenizer_files(tokenizers.tokenizer, vocab_size)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    again = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    for _ in range(7):
        sample = text(rng)
        assert again(sample).input_ids == tokenizer(sample).input_ids, sample
        library = Tokenizer.from_str(json.loads(json.dumps(files["tokenizer.json"].decode())))
        assert library.encode(sample).ids == tokenizer(sample).input_ids, sample


def case(seed, texts=300):
    """Check one tokenizer and one model; AssertionError shows the difference."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    family = FAMILIES[rng.integers(len(FAMILIES))]
    tokenizer, model = family(rng)
    model = model.eval()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "model")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        start = start_model(str(folder))
        pairs = start.config.kind == "encoder-decoder"
        task = Seq2SeqTask() if pairs else ClassifyTask(labels=LABELS)
        config = fine_tuning(start.config, str(folder), task)
        loaded = start.params(False)
        if pairs:
            rows = check_seq2seq(rng, config, start.tokenizers, theirs, model, texts)
            check_loss(config, loaded, theirs, model, rows)
        else:
            config = with_classes(config)
            rows = check_classes(rng, config, start.tokenizers, theirs, texts)
            params, _ = start_params(config, start, loaded, jax.random.key(seed))
            shapes = jax.eval_shape(lambda: init_params(config.model, jax.random.key(0)))
            assert jax.tree.map(np.shape, params) == jax.tree.map(lambda leaf: leaf.shape, shapes)
            check_hidden(config, start, params, theirs, model, rows)
        check_written(rng, start.tokenizers, theirs, start.config.vocab_size, Path(name, "to"))
    return family.__name__


def with_classes(config: TrainConfig) -> TrainConfig:
    from dataclasses import replace

    return replace(config, model=replace(config.model, num_classes=len(LABELS)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    end, seed, failed, seen = time.perf_counter() + args.minutes * 60, args.seed, [], {}
    while time.perf_counter() < end:
        try:
            name = case(seed)
            seen[name] = seen.get(name, 0) + 1
        except (AssertionError, DataError) as error:
            failed.append(f"seed {seed}: {error}")
            print(failed[-1], flush=True)
        seed += 1
    print(f"{seed - args.seed} cases from seed {args.seed} on: {len(failed)} wrong")
    print("right cases:", ", ".join(f"{name} {count}" for name, count in sorted(seen.items())))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
