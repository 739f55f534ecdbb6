"""Sentence encoders: pooling against formulas, and folders."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import transformer_jax as tj
from tests.support.drawn import drawn
from transformer_jax.checkpoints.checkpoint import CheckpointError
from transformer_jax.pretrained.sentences import SentenceEncoder, pool_sentences

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = tj.ModelConfig(
    kind="encoder", vocab_size=31, d_model=6, num_layers=1, num_heads=2, d_ff=5, max_len=29,
    norm_order="post", norm_eps=1e-12, embedding_norm=True, activation="gelu", type_vocab_size=2,
)  # fmt: skip


def plainly(hidden, valid, pooling, normalize):
    """Pool row by row in float64."""
    out = []
    for row, keep in zip(np.asarray(hidden, np.float64), valid, strict=True):
        real = row[keep]
        if not len(real):
            out.append(np.zeros(row.shape[1]))
            continue
        found = dict(mean=real.mean(0), cls=real[0], max=real.max(0), last=real[-1])
        vector = found[pooling]
        out.append(vector / np.linalg.norm(vector) if normalize else vector)
    return np.stack(out)


@pytest.mark.slow_except("cls-True", "max-*", "mean-False", "last-True")
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "last"])
def test_pooling_ignores_invalid_tokens(pooling, normalize, rng):
    hidden = (
        rng.normal(size=(4, 7, 5)).astype(np.float32) - 1.0
    )  # so that a padded 0 would be the maximum
    valid = np.ones((4, 7), bool)
    valid[1, 3:] = valid[2, :2] = valid[3] = False
    want = plainly(hidden, valid, pooling, normalize)
    hidden = np.where(valid[..., None], hidden, np.nan)
    got = np.asarray(pool_sentences(hidden, valid, pooling, normalize))
    assert got.dtype == np.float32 and got.shape == (4, 5)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "last"])
def test_all_padding_row_has_finite_gradient(pooling, rng):
    hidden = rng.normal(size=(2, 3, 5)).astype(np.float32)
    valid = np.array([[True, True, False], [False] * 3])

    def total(hidden):
        return (pool_sentences(hidden, valid, pooling, True) ** 3).sum()

    gradient = np.asarray(jax.grad(total)(hidden))
    assert np.isfinite(gradient).all() and np.abs(gradient[0, :2]).max() > 0
    assert not gradient[1].any() and not gradient[0, 2].any()


@pytest.mark.slow
def test_zero_vector_has_finite_gradient():
    hidden, valid = np.zeros((1, 3, 5), np.float32), np.ones((1, 3), bool)
    gradient = jax.grad(lambda hidden: pool_sentences(hidden, valid, normalize=True).sum())(hidden)
    assert np.isfinite(np.asarray(gradient)).all()


def test_error_names_invalid_pooling_argument(rng):
    hidden, valid = rng.normal(size=(2, 3, 5)), np.ones((2, 3), bool)
    choices = "must be one of 'mean', 'cls', 'max', 'last'"
    with pytest.raises(tj.ConfigError, match=f"pooling is 'first': {choices}"):
        pool_sentences(hidden, valid, "first")
    with pytest.raises(ValueError, match=r"hidden has shape \(2, 3, 5\), valid \(2, 4\)"):
        pool_sentences(hidden, np.ones((2, 4), bool))


class Words:
    """Tokenizer of numbers, with 1 before and 2 after them."""

    def encode(self, text: str, *, special_tokens: bool) -> np.ndarray:
        ids = [int(word) if word.isdigit() else 3 + ord(word[0]) % 20 for word in text.split()]
        return np.array([1, *ids, 2] if special_tokens else ids, np.int32)


@pytest.fixture(scope="module")
def params():
    params = tj.init_params(CONFIG, jax.random.key(3))
    return jax.tree.map(
        lambda leaf: leaf + 0.3 * np.cos(np.arange(leaf.size)).reshape(leaf.shape), params
    )


@pytest.fixture(scope="module")
def encoder(params):
    return SentenceEncoder(CONFIG, params, "mean", True, max_len=23)


@pytest.mark.slow
def test_embedding_is_independent_of_padding_and_other_rows(encoder, params):
    tokens = np.array([[1, 9, 4, 2, 0], [1, 7, 2, 0, 0]], np.int32)
    at = np.array([[0, 1, 2, 3, -1], [0, 1, 2, -1, -1]], np.int32)
    got = np.asarray(encoder.encode(tokens, at))
    for row, length in enumerate((4, 3)):
        alone = tokens[row : row + 1, :length]
        states = tj.build(CONFIG).apply({"params": params}, alone, method="encode")
        want = plainly(states, np.ones((1, length), bool), "mean", True)
        np.testing.assert_allclose(got[row : row + 1], want, rtol=0, atol=1e-5)
        np.testing.assert_allclose(encoder.encode(alone), want, rtol=0, atol=1e-5)


@pytest.mark.long
def test_embeddings_are_returned_in_input_order(encoder):
    texts = ["4 5 6 7 8", "9", "", "10 11 12", "5 4"]
    want = [encoder.encode(Words().encode(text, special_tokens=True)[None]) for text in texts]
    for size in (2, 32):
        got = encoder.encode_texts(texts, Words(), batch_size=size)
        np.testing.assert_allclose(got, np.concatenate(want), rtol=0, atol=1e-5)
    assert encoder.encode_texts([], Words()).shape == (0, 6)


@pytest.mark.slow
def test_long_text_is_truncated_before_closing_special_tokens(encoder):
    words = [str(3 + i % 17) for i in range(40)]
    long = encoder.encode_texts([" ".join(words)], Words())
    short = encoder.encode_texts([" ".join(words[:21])], Words())
    np.testing.assert_array_equal(long, short)
    assert len(Words().encode(" ".join(words[:21]), special_tokens=True)) == encoder.max_len
    other = encoder.encode_texts([" ".join(words[:20])], Words())
    assert np.abs(other - long).max() > 1e-4
    end = dataclasses.replace(encoder, truncate_left=True)
    last = encoder.encode_texts([" ".join(words[-21:])], Words())
    np.testing.assert_array_equal(end.encode_texts([" ".join(words)], Words()), last)


def test_text_without_remaining_room_keeps_only_special_tokens(encoder):
    for truncate_left in False, True:
        small = dataclasses.replace(encoder, max_len=2, truncate_left=truncate_left)
        assert small._ids("3 4 5", Words()).tolist() == [1, 2]


def test_texts_are_lowercased_only_if_folder_requires_it(encoder):
    lower = dataclasses.replace(encoder, lower_case=True)
    one, two = (e.encode_texts(["Apple", "apple"], Words()) for e in (encoder, lower))
    assert np.abs(one[0] - one[1]).max() > 1e-4
    np.testing.assert_array_equal(two[0], two[1])


def test_invalid_arguments_are_rejected(encoder):
    with pytest.raises(ValueError, match="texts is a string"):
        encoder.encode_texts("4 5", Words())
    with pytest.raises(ValueError, match="batch_size is 0"):
        encoder.encode_texts(["4"], Words(), batch_size=0)
    with pytest.raises(ValueError, match=r"token 31 at \[0, 1\]"):
        encoder.encode(np.array([[1, 31]], np.int32))
    narrow = dataclasses.replace(encoder, max_len=1)
    with pytest.raises(ValueError, match="cannot truncate text to max_len 1"):
        narrow.encode_texts(["4 5"], Words())


LIBRARY = "sentence_transformers.models"
OLD = {
    "modules.json": [{"idx": 0, "name": "0", "path": "", "type": f"{LIBRARY}.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{LIBRARY}.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Norm", "type": f"{LIBRARY}.Normalize"}],
    "1_Pooling/config.json": {"word_embedding_dimension": 6, "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False},
    "sentence_bert_config.json": {"max_seq_length": 23, "do_lower_case": False},
}  # fmt: skip


def lay(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.fixture
def folder(params, tmp_path):
    tj.save_pretrained(tmp_path / "model", CONFIG, params, family="bert")
    return lay(tmp_path / "model", OLD)


@pytest.mark.slow
def test_model_folder_configures_sentence_encoder(folder, encoder):
    found = tj.load_sentence_encoder(folder)
    tokens = np.array([[1, 9, 4, 2, 0]], np.int32)
    for name in ("config", "pooling", "normalize", "max_len", "lower_case"):
        assert getattr(found, name) == getattr(encoder, name), name
    np.testing.assert_array_equal(found.encode(tokens), encoder.encode(tokens))

    pooling = OLD["1_Pooling/config.json"] | {
        "pooling_mode_mean_tokens": False,
        "pooling_mode_max_tokens": True,
    }
    lay(folder, {"modules.json": OLD["modules.json"][:2], "1_Pooling/config.json": pooling})
    lay(folder, {"sentence_bert_config.json": {"max_seq_length": None, "do_lower_case": True}})
    found = tj.load_sentence_encoder(folder, dtype="bfloat16")
    assert (found.pooling, found.normalize, found.lower_case) == ("max", False, True)
    assert (found.max_len, found.config.dtype) == (29, "bfloat16")
    assert found.encode(tokens).dtype == np.float32


@pytest.mark.parametrize(
    "name", ["bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"]
)
def test_length_limit_is_read_from_every_config_variant(name, folder):
    """Names and order are from `Transformer.load_config` in sentence-transformers."""
    (folder / "sentence_bert_config.json").unlink()
    lay(folder, {f"sentence_{name}_config.json": {"max_seq_length": 8, "do_lower_case": True}})
    if name != "xlnet":  # the last name in the search order
        lay(folder, {"sentence_xlnet_config.json": {"max_seq_length": 9}})
    found = tj.load_sentence_encoder(folder)
    assert (found.max_len, found.lower_case, found.truncate_left) == (8, True, False)


def test_truncation_side_comes_from_tokenizer_config(folder):
    for side in "left", "right":
        lay(folder, {"tokenizer_config.json": {"truncation_side": side}})
        assert tj.load_sentence_encoder(folder).truncate_left == (side == "left")


def test_newer_sentence_transformers_keys_are_accepted(folder):
    kinds = (
        "sentence_transformers.base.modules.transformer.Transformer",
        "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
        "sentence_transformers.base.modules.normalize.Normalize",
    )
    parts = [part | {"type": kind} for part, kind in zip(OLD["modules.json"], kinds, strict=True)]
    embedding = "sentence_embedding"
    lay(folder, {
        "modules.json": parts,
        "1_Pooling/config.json": {"pooling_mode": "cls", "embedding_dimension": 6},
        "2_Norm/config.json": {"module_input_name": embedding, "module_output_name": embedding},
        "sentence_bert_config.json": {
            "transformer_task": "feature-extraction",
            "modality_config": {
                "text": {"method": "forward", "method_output_name": "last_hidden_state"}
            },
            "module_output_name": "token_embeddings",
        },
        "tokenizer_config.json": {"model_max_length": 19},
    })  # fmt: skip
    found = tj.load_sentence_encoder(folder)
    assert (found.pooling, found.normalize, found.max_len) == ("cls", True, 19)
    lay(folder, {"tokenizer_config.json": {"model_max_length": 1e30}})
    assert tj.load_sentence_encoder(folder).max_len == 29


def part(number, **changes):
    return [p | changes if i == number else p for i, p in enumerate(OLD["modules.json"])]


POOLING = OLD["1_Pooling/config.json"]
SEQUENCE = OLD["sentence_bert_config.json"]
REFUSED = {
    "a dense layer": ("modules.json", part(2, type="sentence_transformers.models.Dense"),
        "part 2: type is 'sentence_transformers.models.Dense': must be Normalize of"),
    "another library": ("modules.json", part(0, type="mine.Transformer"), "type is 'mine.T"),
    "four parts": ("modules.json", OLD["modules.json"] * 2, "parts are .*: must be Transformer"),
    "no pooling": ("modules.json", OLD["modules.json"][:1], "parts are .*: must be Transformer"),
    "a model elsewhere": ("modules.json", part(0, path="0_T"), "path is '0_T': must be ''"),
    "a path outside": ("modules.json", part(1, path="../x"), "is not a plain file name"),
    "no path": ("modules.json", part(1, path=3), "path is 3: must be the name of a folder"),
    "an object": ("modules.json", {}, "must be a list of objects"),
    "two poolings": ("1_Pooling/config.json", POOLING | {"pooling_mode_max_tokens": True},
        r"pooling is \['mean', 'max'\]: must be exactly one of"),
    "no pooling at all": ("1_Pooling/config.json", POOLING | {"pooling_mode_mean_tokens": False},
        r"pooling is \[\]: must be exactly one of"),
    "the last token too": ("1_Pooling/config.json", POOLING | {"pooling_mode_lasttoken": True},
        r"pooling is \['mean', 'last'\]: must be exactly one of"),
    "a root of the length": ("1_Pooling/config.json", POOLING
        | {"pooling_mode_mean_sqrt_len_tokens": True},
        "pooling_mode_mean_sqrt_len_tokens is True: must be False"),
    "weights": ("1_Pooling/config.json", {"pooling_mode": "weightedmean"},
        "pooling_mode is 'weightedmean': must be one of 'mean', 'cls', 'max'"),
    "without the prompt": ("1_Pooling/config.json", POOLING | {"include_prompt": False},
        "include_prompt is False: must be True"),
    "an unknown key": ("1_Pooling/config.json", POOLING | {"depth": 3}, "depth is 3: this key is"),
    "longer than the table": ("sentence_bert_config.json", SEQUENCE | {"max_seq_length": 30},
        "max_seq_length is 30: must be at most the encoder's maximum length, 29"),
    "arguments": ("sentence_bert_config.json", SEQUENCE
        | {"model_args": {"trust_remote_code": True}}, "model_args is .*: must be {}"),
    "a prompt that is not there": ("config_sentence_transformers.json",
        {"prompts": {"query": "query: "}, "default_prompt_name": "passage"},
        "default_prompt_name is 'passage': must be one of 'query'"),
    "a prompt that is no text": ("config_sentence_transformers.json", {"prompts": {"query": 3}},
        "prompts is {'query': 3}: must be an object whose values are strings"),
    "prompts that are a list": ("config_sentence_transformers.json", {"prompts": []},
        r"prompts is \[\]: must be an object whose values are strings"),
    "narrower vectors": ("config_sentence_transformers.json", {"truncate_dim": 4},
        "truncate_dim is 4: must be null"),
    "a third side": ("tokenizer_config.json", {"truncation_side": "both"},
        "truncation_side is 'both': must be one of 'right', 'left'"),
    "texts in another way": ("sentence_bert_config.json", SEQUENCE
        | {"modality_config": {"text": {"method": "encode"}}},
        "modality_config is .*: text must be"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_folder_contents_are_rejected_by_name(name, folder):
    file, content, message = REFUSED[name]
    tj.load_sentence_encoder(folder)
    lay(folder, {file: content})
    with pytest.raises((tj.ConfigError, CheckpointError), match=message) as caught:
        tj.load_sentence_encoder(folder)
    assert str(folder) in str(caught.value)


def test_prompt_is_prepended_to_every_text(folder):
    settings = {"prompts": {"query": "9 ", "document": ""}, "default_prompt_name": "query"}
    lay(folder, {"config_sentence_transformers.json": settings})
    found = tj.load_sentence_encoder(folder)
    assert (found.prompts, found.prompt) == (settings["prompts"], "9 ")
    by_hand = found.encode_texts(["9 4 5"], Words(), prompt="")
    np.testing.assert_array_equal(found.encode_texts(["4 5"], Words()), by_hand)
    bare = found.encode_texts(["4 5"], Words(), prompt=found.prompts["document"])
    assert np.abs(bare - by_hand).max() > 1e-4


def test_encoder_decoder_cannot_be_used_as_sentence_encoder(tmp_path):
    config = tj.ModelConfig(
        kind="encoder-decoder", vocab_size=31, d_model=6, num_layers=1, num_heads=2, d_ff=5,
        norm="rmsnorm", use_bias=False, activation="relu", positions="t5", norm_eps=1e-6,
        attention_scale=1.0, logit_scale=6**-0.5,
    )  # fmt: skip
    tj.save_pretrained(tmp_path / "t5", config, drawn(config))
    lay(tmp_path / "t5", OLD)
    with pytest.raises(
        tj.ConfigError, match="is an encoder-decoder: must be an encoder or a decoder"
    ):
        tj.load_sentence_encoder(tmp_path / "t5")


@pytest.mark.slow_except("modules.json")
@pytest.mark.parametrize("file", ["modules.json", "1_Pooling/config.json"])
def test_folder_without_sentence_encoder_is_rejected(file, folder):
    (folder / file).unlink()
    with pytest.raises(CheckpointError, match=file):
        tj.load_sentence_encoder(folder)
