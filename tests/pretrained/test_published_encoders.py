"""BERT, RoBERTa, and DistilBERT with every head, compared with `transformers`; see published.py.

Rows of a batch: one without padding, one with right padding, one with left padding. By default,
BERT and DistilBERT count left padding, so the positions are passed to them; RoBERTa counts only
the ids other than `pad_token_id`, and gets only the ids. All of them classify the first token, even
if it is padding: the classes of such a row are compared with those of the row without padding.
"""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

published = pytest.importorskip("tests.support.published")

from safetensors.numpy import load_file, save_file  # noqa: E402

from tests.support.model_folders import assert_loads  # noqa: E402
from tests.support.published import (  # noqa: E402
    assert_same_gradients,
    assert_same_logits,
    positions,
    randomised,
    reopened,
    saved,
    tokens,
    torch,
    transformers,
)
from transformer_jax import (  # noqa: E402
    build,
    load_pretrained,
    save_pretrained,
)
from transformer_jax.models.factory import init_params  # noqa: E402
from transformer_jax.pretrained.families import FAMILIES  # noqa: E402
from transformer_jax.pretrained.safetensors_folder import CheckpointError  # noqa: E402

V, T = 97, 523


pytestmark = pytest.mark.slow  # folders and golden numbers also have fast tests without torch


@pytest.fixture(autouse=True, scope="module")
def quick_to_compile():
    """Compile quickly, since programs run once; other tests use the default options."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


SIZES = {
    "bert": (dict(hidden_size=28, num_attention_heads=4, num_hidden_layers=2, intermediate_size=37),
        dict(hidden_size=33, num_attention_heads=3, num_hidden_layers=1, intermediate_size=19,
        hidden_act="gelu_new", type_vocab_size=3, layer_norm_eps=1e-5, hidden_dropout_prob=0.0)),
    "roberta": (dict(hidden_size=28, num_attention_heads=4, num_hidden_layers=2,
        intermediate_size=37, type_vocab_size=1), dict(hidden_size=33, num_attention_heads=3,
        num_hidden_layers=1, intermediate_size=19, type_vocab_size=2, layer_norm_eps=1e-5,
        pad_token_id=2, bos_token_id=1)),
    "distilbert": (dict(dim=28, n_heads=4, n_layers=2, hidden_dim=37),
        dict(dim=33, n_heads=3, n_layers=1, hidden_dim=19, activation="relu",
        sinusoidal_pos_embds=True, attention_dropout=0.0)),
}  # fmt: skip
GLOBAL, LOCAL = (f"{kind}_attention" for kind in ("full", "sliding"))
SIZES["modernbert"] = (
    dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=4, intermediate_size=37,
        local_attention=20, pad_token_id=None),
    dict(hidden_size=36, num_attention_heads=3, num_hidden_layers=3, intermediate_size=19,
        local_attention=9, pad_token_id=None, layer_types=[LOCAL, GLOBAL, LOCAL],
        hidden_activation="silu", classifier_activation="silu", norm_bias=True,
        classifier_pooling="mean", classifier_bias=True, attention_bias=True, norm_eps=1e-2,
        embedding_dropout=0.1, rope_parameters={kind: dict(rope_type="default", rope_theta=theta)
        for kind, theta in ((GLOBAL, 1000.0), (LOCAL, 50.0))}),
)  # fmt: skip
SIZES["nomic_bert"] = (
    dict(hidden_size=28, num_attention_heads=7, num_hidden_layers=2, intermediate_size=37),
    dict(hidden_size=30, num_attention_heads=3, num_hidden_layers=1, intermediate_size=19,
        hidden_act="gelu", type_vocab_size=3, layer_norm_eps=1e-5, head_dim=8,
        hidden_dropout_prob=0.1, rope_parameters=dict(rope_type="default", rope_theta=50.0)),
)  # fmt: skip
SIZES["electra"] = (
    dict(SIZES["bert"][0], embedding_size=11),
    dict(SIZES["bert"][1], embedding_size=33, hidden_act="gelu"),
)
SIZES["albert"] = (
    dict(SIZES["bert"][0], num_hidden_layers=3, embedding_size=11),
    dict(SIZES["bert"][1], num_hidden_layers=2, embedding_size=33, hidden_act="relu"),
)
SIZES["mpnet"] = SIZES["bert"][0], dict(
    hidden_size=33, num_attention_heads=3, num_hidden_layers=1, intermediate_size=19,
    layer_norm_eps=1e-5, hidden_dropout_prob=0.0,
)  # fmt: skip
SIZES |= {"xlm-roberta": SIZES["roberta"], "camembert": SIZES["roberta"]}
CLASSES = {"bert": "Bert", "roberta": "Roberta", "distilbert": "DistilBert"}
CLASSES |= {"xlm-roberta": "XLMRoberta", "camembert": "Camembert", "modernbert": "ModernBert"}
CLASSES |= {"nomic_bert": "NomicBert", "mpnet": "MPNet", "electra": "Electra", "albert": "Albert"}
HEADS = [
    ("bert", "ForMaskedLM"), ("bert", "Model"), ("bert", "ForSequenceClassification"),
    ("bert", "ForPreTraining"), ("roberta", "ForMaskedLM"), ("roberta", "Model"),
    ("roberta", "ForSequenceClassification"), ("xlm-roberta", "ForMaskedLM"),
    ("camembert", "ForSequenceClassification"), ("distilbert", "ForMaskedLM"),
    ("distilbert", "Model"), ("distilbert", "ForSequenceClassification"),
    ("bert", "ForTokenClassification"), ("bert", "ForQuestionAnswering"),
    ("roberta", "ForTokenClassification"), ("roberta", "ForQuestionAnswering"),
    ("distilbert", "ForTokenClassification"), ("distilbert", "ForQuestionAnswering"),
    ("modernbert", "ForMaskedLM"), ("modernbert", "Model"),
    ("modernbert", "ForSequenceClassification"), ("modernbert", "ForTokenClassification"),
    ("modernbert", "ForQuestionAnswering"), ("nomic_bert", "ForMaskedLM"), ("nomic_bert", "Model"),
    ("nomic_bert", "ForSequenceClassification"), ("nomic_bert", "ForTokenClassification"),
    ("mpnet", "ForMaskedLM"), ("mpnet", "Model"), ("mpnet", "ForSequenceClassification"),
    ("mpnet", "ForTokenClassification"), ("mpnet", "ForQuestionAnswering"),
    ("electra", "ForMaskedLM"), ("electra", "Model"), ("electra", "ForPreTraining"),
    ("electra", "ForSequenceClassification"), ("electra", "ForTokenClassification"),
    ("electra", "ForQuestionAnswering"), ("albert", "ForMaskedLM"), ("albert", "Model"),
    ("albert", "ForPreTraining"), ("albert", "ForSequenceClassification"),
    ("albert", "ForTokenClassification"), ("albert", "ForQuestionAnswering"),
]  # fmt: skip
IN_MEMORY = [head for head in HEADS if head[0] != "nomic_bert"]
"""Families with the same tensor names in files and in memory."""


def make(family: str, head: str, number: int = 0, **more):
    """Return a random model and the class that loads it."""
    auto = getattr(transformers, CLASSES[family] + head)
    config = getattr(transformers, CLASSES[family] + "Config")
    sizes = dict(max_position_embeddings=T + 8, vocab_size=V) | SIZES[family][number]
    if head in ("ForSequenceClassification", "ForTokenClassification"):
        sizes["num_labels"] = (3, 2)[number]
    model = randomised(auto(config(**sizes | more)), seed=number)
    with torch.no_grad():  # well separated classes
        for name, parameter in model.named_parameters():
            if "classifier" in name or "seq_relationship" in name or "qa_outputs" in name:
                parameter.mul_(4)
    return model, auto


def batch(rng: np.random.Generator, config, pad: int):
    """Return ids, positions, and types: no padding, right padding, left padding."""
    valid = np.ones((3, T), bool)
    valid[1, 401:] = valid[2, :139] = False
    ids = np.where(valid, tokens(rng, V, 3, T), pad)
    kinds = config.type_vocab_size
    types = None if kinds is None else rng.integers(0, kinds, ids.shape, dtype=np.int32)
    return ids.astype(np.int32), positions(valid), types


def torch_inputs(family: str, ids, at, types):
    """Return the same inputs for `transformers`."""
    mask = torch.tensor(at >= 0)
    out = dict(input_ids=torch.tensor(ids).long(), attention_mask=mask.long())
    if family in ("bert", "distilbert", "electra", "albert"):
        out["position_ids"] = torch.tensor(np.maximum(at, 0)).long()
    if types is not None:
        out["token_type_ids"] = torch.tensor(types).long()
    return out


def unpadded_row(family: str, ids, at, types):
    """Return the last row without its padding, for `transformers`."""
    real = at[2] >= 0
    out = dict(input_ids=torch.tensor(ids[2:, real]).long())
    if types is not None:
        out["token_type_ids"] = torch.tensor(types[2:, real]).long()
    return out


def class_logits(head: str, want):
    """Return transformers' logits of each text, or of each token if the head reads all."""
    if head == "ForPreTraining":  # an ELECTRA has one number per token
        named = [want[name] for name in ("seq_relationship_logits", "sop_logits") if name in want]
        return named[0] if named else want["logits"][..., None]
    if head == "ForQuestionAnswering":
        return torch.stack([want["start_logits"], want["end_logits"]], dim=-1)
    return want["logits"]


def near(got, want, tolerance: float = published.LOGITS) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape and got.size and np.isfinite(want).all()
    assert np.abs(got - want).max() <= tolerance


def zeros(config):
    """Return zeros with the shapes of the parameters."""
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)


def everything(config, params, ids, at, types):
    """Return logits, attention, and classes or pooled vectors, from one compiled program."""
    model = build(config)

    @jax.jit
    def run(params, ids, at, types):
        def call(method):
            return model.apply({"params": params}, ids, positions=at, types=types, method=method)

        options = dict(positions=at, types=types, capture=published.views(config))
        if not config.has_logits:
            options["method"] = "encode"
        logits, *_, seen = model.apply({"params": params}, ids, **options)
        if config.num_classes is not None:
            return logits, seen, None, call("classify")
        return logits, seen, None if config.pooling is None else call("pool"), None

    return run(params, ids, at, types)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(("family", "head"), HEADS)
def test_outputs_match_transformers(family, head, number, rng, tmp_path):
    model, auto = make(family, head, number)
    folder = saved(model, tmp_path / "model")
    config, params = load_pretrained(folder)
    pad = model.config.pad_token_id or 0
    ids, at, types = batch(rng, config, pad)
    if (
        number or (family, head) != HEADS[0]
    ):  # the default implementation takes three times as long to compile
        config = dataclasses.replace(config, implementation="xla")
    logits, seen, pooled, classes = everything(config, params, ids, at, types)
    theirs = reopened(folder, auto)
    with torch.no_grad():
        want = theirs(
            **torch_inputs(family, ids, at, types),
            output_hidden_states=True,
            output_attentions=True,
        )
        single = theirs(**unpadded_row(family, ids, at, types))

    real = at >= 0
    states = torch.stack(want["hidden_states"], dim=1).numpy()
    rows = [(b, real[b]) for b in range(3)]
    for b, keep in rows:
        near(published.hidden_states(seen)[b][:, keep], states[b][:, keep])
        for i, weights in enumerate(want["attentions"]):
            near(published.weights_of(seen)[b, i][:, keep], weights[b].numpy()[:, keep], 1e-5)
    replaced = (family, head) == ("electra", "ForPreTraining")
    assert config.masked_token_head == (head in ("ForMaskedLM", "ForPreTraining") and not replaced)
    if config.masked_token_head:
        key = "prediction_logits" if head == "ForPreTraining" else "logits"
        assert_same_logits(logits, want[key], real)
    kinds = {"ForTokenClassification": "token", "ForQuestionAnswering": "span"}
    kinds |= {head: "token"} if replaced else {}
    assert config.classes_of == kinds.get(head, "text")
    assert (config.num_classes is not None) == (
        head in ("ForSequenceClassification", "ForPreTraining", *kinds)
    )
    if head in kinds:
        wanted = class_logits(head, want).numpy()[real]
        assert wanted.std() > 0.1
        near(np.asarray(classes)[real], wanted)
    elif config.num_classes is not None:
        both = np.concatenate(
            [class_logits(head, want)[:2].numpy(), class_logits(head, single).numpy()]
        )
        assert both.std() > 0.1
        near(classes, both)
        assert (np.asarray(classes).argmax(-1) == both.argmax(-1)).all()
    pools = head in ("ForSequenceClassification", "ForPreTraining") or "pooler_output" in want
    pools |= family == "modernbert" and head in kinds
    assert (config.pooling is not None) == pools
    if "pooler_output" in want:
        near(pooled, np.concatenate([want["pooler_output"][:2], single["pooler_output"]]))


@pytest.mark.parametrize(("family", "head"), IN_MEMORY)
def test_gradients_match_transformers(family, head, rng, tmp_path):
    model, _ = make(family, head)
    config, params = load_pretrained(saved(model, tmp_path / "model"))
    ids, at, types = batch(rng, config, model.config.pad_token_id or 0)
    ids, at = ids[:2, :401], at[:2, :401]
    at[1, 359:], ids[1, 359:] = -1, model.config.pad_token_id or 0
    types = None if types is None else types[:2, :401]
    real = at >= 0
    if (family, head) != HEADS[0]:
        config = dataclasses.replace(config, implementation="xla")
    # a loss of all outputs, with weights that break their symmetry
    share = rng.normal(size=(*ids.shape, V)).astype(np.float32) * real[..., None] / real.sum()
    ours = build(config)

    def loss(params):
        def call(method):
            return ours.apply({"params": params}, ids, positions=at, types=types, method=method)

        total = jnp.zeros(())
        if config.masked_token_head:
            total += (jax.nn.log_softmax(call("__call__")[0]) * share).sum()
        elif config.num_classes is None:
            total += (call("encode") * share[..., : config.d_model]).sum()
        if config.num_classes is not None:
            scores = call("classify")
            scores = scores if config.num_classes == 1 else jax.nn.log_softmax(scores)
            part = share[:, 0] if config.classes_of == "text" else share
            total += (scores * part[..., : config.num_classes]).sum()
        elif config.pooling is not None:
            total += (call("pool") * share[:, 0, : config.d_model]).sum()
        return total

    want = model(**torch_inputs(family, ids, at, types))
    weight = torch.tensor(share)
    total = torch.zeros(())
    if config.masked_token_head:
        scores = want["prediction_logits" if head == "ForPreTraining" else "logits"]
        total = total + (scores.log_softmax(-1) * weight).sum()
    elif config.num_classes is None:
        total = total + (want["last_hidden_state"] * weight[..., : config.d_model]).sum()
    if config.num_classes is not None:
        part = weight[:, 0] if config.classes_of == "text" else weight
        scores = class_logits(head, want)
        scores = scores if config.num_classes == 1 else scores.log_softmax(-1)
        total = total + (scores * part[..., : config.num_classes]).sum()
    elif config.pooling is not None:
        total = total + (want["pooler_output"] * weight[:, 0, : config.d_model]).sum()
    bare = head == "Model"
    prefix = FAMILIES[family].prefix if bare else ""
    table = [
        dataclasses.replace(mapping, tensor=mapping.tensor.removeprefix(prefix))
        for mapping in FAMILIES[family].table(config)
    ]
    if (family, head) == ("xlm-roberta", "ForMaskedLM"):  # its head comes first in memory
        assert table[0].param == "embed/tokens"
        table[0] = dataclasses.replace(table[0], tensor="lm_head.decoder.weight")
    assert_same_gradients(config, params, loss, model, total, table)


@pytest.mark.parametrize(("family", "head"), HEADS)
def test_saving_in_original_format_preserves_names_and_bits(family, head, rng, tmp_path):
    """A bare original gives a bare folder."""
    model, auto = make(family, head, 1)
    folder = saved(model, tmp_path / "model")
    config, params = load_pretrained(folder)
    again = tmp_path / "like"
    save_pretrained(again, config, params, like=folder)
    one, two = load_file(folder / "model.safetensors"), load_file(again / "model.safetensors")
    assert {k: v.tobytes() for k, v in one.items()} == {k: v.tobytes() for k, v in two.items()}
    assert {k: v.shape for k, v in one.items()} == {k: v.shape for k, v in two.items()}
    assert load_pretrained(again)[0] == config
    inputs = dict(input_ids=torch.tensor(tokens(rng, V, 2, 31)).long())
    with torch.no_grad():
        first, second = (reopened(f, auto)(**inputs) for f in (folder, again))
    assert torch.equal(first[0], second[0])


@pytest.mark.parametrize(("family", "head"), HEADS)
def test_newly_saved_folder_declares_its_heads(family, head, tmp_path):
    """The model that transformers builds from config.json uses every tensor."""
    model, auto = make(family, head)
    config, params = load_pretrained(saved(model, tmp_path / "model"))
    save_pretrained(tmp_path / "again", config, params, family=family)
    content = json.loads((tmp_path / "again" / "config.json").read_text())
    assert content["architectures"] == [auto.__name__]
    assert content["model_type"] == family
    back, info = auto.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[name]), name
    same = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
    for name in (*same, "num_labels", "max_position_embeddings"):
        assert getattr(back.config, name, None) == getattr(model.config, name, None), name


def rewritten(folder, change) -> None:
    """Rewrite the tensors of a folder with `change`."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


def test_legacy_names_buffers_and_copies_are_accepted(tmp_path, rng):
    """The names are those of bert-base-uncased and MiniLM."""
    model, _ = make("bert", "ForPreTraining")
    folder = saved(model, tmp_path / "model")
    config, params = load_pretrained(folder)

    def old(found):
        table = found["bert.embeddings.word_embeddings.weight"]
        found["cls.predictions.decoder.weight"] = table.copy()
        found["cls.predictions.decoder.bias"] = found["cls.predictions.bias"].copy()
        found["bert.embeddings.position_ids"] = np.arange(T + 8)[None]
        ends = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        for name in list(found):
            for new, before in ends.items():
                if name.endswith(new):
                    found[name.removesuffix(new) + before] = found.pop(name)
        return found

    rewritten(folder, old)
    assert any(name.endswith("gamma") for name in load_file(folder / "model.safetensors"))
    assert_loads(folder, config, params)

    def other(found):
        found["cls.predictions.decoder.bias"] = found["cls.predictions.decoder.bias"] + 1
        return found

    rewritten(folder, other)
    with pytest.raises(CheckpointError, match=r"decoder.bias must equal cls.predictions.bias"):
        load_pretrained(folder)


@pytest.mark.parametrize("family", [name for name in CLASSES if name != "modernbert"])
def test_checkpoint_without_prefix_may_include_heads(family, tmp_path):
    """The model's tensors lack the prefix; the heads have their usual names."""
    model, _ = make(family, "ForSequenceClassification")
    folder = saved(model, tmp_path / "model")
    config, params = load_pretrained(folder)
    prefix = FAMILIES[family].prefix
    rewritten(folder, lambda found: {k.removeprefix(prefix): v for k, v in found.items()})
    assert not any(name.startswith(prefix) for name in load_file(folder / "model.safetensors"))
    assert_loads(folder, config, params)


def test_pretraining_pooler_is_ignored_by_classifier(tmp_path):
    """An example is roberta-large-mnli."""
    model, _ = make("roberta", "ForSequenceClassification")
    folder = saved(model, tmp_path / "model")
    config, params = load_pretrained(folder)

    def left(found):
        found["roberta.pooler.dense.weight"] = np.ones((28, 28), np.float32)
        found["roberta.pooler.dense.bias"] = np.ones(28, np.float32)
        return found

    rewritten(folder, left)
    assert_loads(folder, config, params)


def test_masked_token_head_and_pooler_coexist(tmp_path):
    """An example is roberta-base."""
    model, auto = make("roberta", "ForMaskedLM")
    folder = saved(model, tmp_path / "model")

    def both(found):
        found["roberta.pooler.dense.weight"] = np.ones((28, 28), np.float32)
        found["roberta.pooler.dense.bias"] = np.ones(28, np.float32)
        return found

    rewritten(folder, both)
    config, params = load_pretrained(folder)
    assert config.masked_token_head and config.pooler == "tanh"
    save_pretrained(tmp_path / "again", config, params)
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == (
        load_file(folder / "model.safetensors").keys()
    )
    auto.from_pretrained(tmp_path / "again")


def test_class_names_are_kept_if_count_matches(tmp_path):
    model, _ = make("distilbert", "ForSequenceClassification", 1)
    model.config.id2label = {0: "NEGATIVE", 1: "POSITIVE"}
    model.config.label2id = {"NEGATIVE": 0, "POSITIVE": 1}
    folder = saved(model, tmp_path / "model")
    config, params = load_pretrained(folder)
    save_pretrained(tmp_path / "same", config, params, like=folder)
    back = transformers.AutoConfig.from_pretrained(tmp_path / "same")
    assert back.id2label == {0: "NEGATIVE", 1: "POSITIVE"}

    more = dataclasses.replace(config, num_classes=5)
    save_pretrained(tmp_path / "more", more, zeros(more), like=folder)
    found = transformers.AutoConfig.from_pretrained(tmp_path / "more")
    assert found.num_labels == 5 and found.architectures == model.config.architectures
    assert load_pretrained(tmp_path / "more")[0].num_classes == 5

    masked = dataclasses.replace(
        config, num_classes=None, pooler=None, masked_token_head=True, logit_bias=True
    )
    save_pretrained(tmp_path / "masked", masked, zeros(masked), like=folder)
    found = transformers.AutoConfig.from_pretrained(tmp_path / "masked")
    assert found.architectures == ["DistilBertForMaskedLM"]


def test_pooler_does_not_affect_token_classifier(tmp_path, rng):
    """Old files of BertForTokenClassification contain one."""
    model, auto = make("bert", "ForTokenClassification")
    folder = saved(model, tmp_path / "model")
    size = model.config.hidden_size
    pooler = {"bert.pooler.dense.weight": np.ones((size, size), np.float32)}
    pooler |= {"bert.pooler.dense.bias": np.ones(size, np.float32)}
    rewritten(folder, lambda found: found | pooler)
    config, params = load_pretrained(folder)
    assert (config.classes_of, config.pooler, config.num_classes) == ("token", "tanh", 3)
    ids = tokens(rng, V, 2, 31)
    got = build(config).apply({"params": params}, ids, method="classify")
    with torch.no_grad():
        near(got, reopened(folder, auto)(torch.tensor(ids).long()).logits)
