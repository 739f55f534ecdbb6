"""Encoders that classify tokens or answer spans, without torch."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.drawn import drawn
from tests.support.model_folders import assert_loads
from transformer_jax.config import ConfigError, Learned, ModelConfig
from transformer_jax.config.tasks import ClassifyTask
from transformer_jax.models.factory import build
from transformer_jax.models.flops import forward_flops
from transformer_jax.pretrained.load import load_pretrained
from transformer_jax.pretrained.save import save_pretrained

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = ModelConfig(
    kind="encoder", vocab_size=31, d_model=6, num_layers=1, num_heads=2, d_ff=5, max_len=29,
    norm_order="post", norm_eps=1e-12, embedding_norm=True, activation="gelu", type_vocab_size=2,
    num_classes=2,
)  # fmt: skip
NO_TYPES = dict(type_vocab_size=None)
OFFSET = dict(positions=Learned(offset=2))
CASES = [
    ("bert", "token", {}, "classifier", "BertForTokenClassification"),
    ("bert", "span", {}, "qa_outputs", "BertForQuestionAnswering"),
    ("roberta", "token", OFFSET, "classifier", "RobertaForTokenClassification"),
    ("roberta", "span", OFFSET, "qa_outputs", "RobertaForQuestionAnswering"),
    ("distilbert", "token", NO_TYPES, "classifier", "DistilBertForTokenClassification"),
    ("distilbert", "span", NO_TYPES, "qa_outputs", "DistilBertForQuestionAnswering"),
]


@pytest.mark.parametrize(("family", "of", "changes", "tensor", "architecture"), CASES)
def test_model_folder_determines_whether_texts_or_tokens_are_classified(
    family, of, changes, tensor, architecture, tmp_path
):
    config = replace(CONFIG, classes_of=of, **changes)
    params = drawn(config)
    assert "pooler" not in params and params["classifier"]["kernel"].shape == (6, 2)
    save_pretrained(tmp_path / "m", config, params, family=family)
    content = json.loads((tmp_path / "m" / "config.json").read_text())
    assert content["architectures"] == [architecture] and content["num_labels"] == 2
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    kernel = np.asarray(params["classifier"]["kernel"])
    np.testing.assert_array_equal(tensors[f"{tensor}.weight"], kernel.T)
    assert_loads(tmp_path / "m", config, params)
    if of == "token":
        del content["architectures"]
        (tmp_path / "m" / "config.json").write_text(json.dumps(content))
        rule = r"architectures is None: must be, without .*, a class for tokens"
        with pytest.raises(ConfigError, match=rule):
            load_pretrained(tmp_path / "m")


def test_new_classification_head_removes_old_head_keys(tmp_path):
    old, new = (replace(CONFIG, num_classes=n, pooler="tanh") for n in (5, 3))
    labels = {str(i): f"emotion {i}" for i in range(5)}
    keys = dict(
        id2label=labels, label2id={name: int(i) for i, name in labels.items()},
        problem_type="multi_label_classification", finetuning_task="emotions",
        task_specific_params={"x": 1}, gradient_checkpointing=False,
        sbert_ce_default_activation_function="torch.nn.Sigmoid",
    )  # fmt: skip
    save_pretrained(tmp_path / "old", old, drawn(old), family="bert", keys=keys)
    written = json.loads((tmp_path / "old" / "config.json").read_text())
    assert written["problem_type"] == keys["problem_type"]
    for config in (new, replace(CONFIG, num_classes=5, classes_of="token")):
        to = tmp_path / f"{config.num_classes} {config.classes_of}"
        save_pretrained(to, config, drawn(config), like=tmp_path / "old")
        content = json.loads((to / "config.json").read_text())
        assert content.keys() & keys.keys() == {"gradient_checkpointing"}
        assert content["num_labels"] == config.num_classes
    save_pretrained(tmp_path / "same", old, drawn(old), like=tmp_path / "old")
    assert json.loads((tmp_path / "same" / "config.json").read_text()) == written


@pytest.mark.parametrize("of", ["token", "span"])
def test_token_classes_are_computed_from_hidden_states(of, rng):
    config = replace(CONFIG, classes_of=of)
    params = drawn(config)
    params["classifier"] = {
        "kernel": rng.normal(size=(6, 2)).astype(np.float32),
        "bias": rng.normal(size=2).astype(np.float32),
    }
    tokens = rng.integers(0, 31, (2, 5), dtype=np.int32)
    positions = np.array([[0, 1, 2, 3, 4], [0, 1, 2, -1, -1]])
    run = build(config).apply
    options = dict(positions=positions)
    hidden = np.asarray(run({"params": params}, tokens, **options, method="encode"), np.float64)
    got = run({"params": params}, tokens, **options, method="classify")
    assert got.shape == (2, 5, 2) and got.dtype == np.float32
    want = hidden @ params["classifier"]["kernel"] + params["classifier"]["bias"]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_training_token_classifier_is_rejected():
    with pytest.raises(
        ConfigError, match="classes_of is 'token': must be 'text': no task trains classes of tokens"
    ):
        ClassifyTask().check_model(replace(CONFIG, classes_of="token"))


def test_flops_include_classifier_for_each_token():
    """Text classifiers run the pooler and the classifier once per text."""
    token, text = (forward_flops(replace(CONFIG, classes_of=of), 7) for of in ("token", "text"))
    assert token - text == 2 * 6 * 2 * (7 - 1) - 2 * 6 * 6
    transform = replace(CONFIG, classes_of="token", pooler="transform", pooler_reads="each")
    assert forward_flops(transform, 7) - token == 2 * 6 * 6 * 7
    mean = replace(CONFIG, pooler="transform", pooler_reads="mean")
    assert forward_flops(mean, 7) == text
