"""Adapter training: trained and frozen parameters, resuming, and rejected configs."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.tolerances import assert_near, assert_same_bits
from transformer_jax.checkpoints import checkpoint
from transformer_jax.checkpoints.checkpoint import CheckpointError
from transformer_jax.config import ConfigError, LoraConfig, ModelConfig, TrainConfig, fine_tuning
from transformer_jax.config.tasks import ClassifyTask, LanguageTask, MaskedTask, Seq2SeqTask
from transformer_jax.loading import load_adapters, load_run
from transformer_jax.training.batch import batch_scores
from transformer_jax.training.initial import start_model
from transformer_jax.training.loop import fit
from transformer_jax.training.tasks import load_task

pytestmark = pytest.mark.usefixtures("quick_compilation")

TEXT = "to be or not to be that is the question\n" * 30
LORA = LoraConfig(rank=3, alpha=6.0, targets="all-linear", dropout=0.1)


def base_config(folder, **changes):
    (folder / "base.txt").write_text(TEXT)
    model = changes.pop("model", None) or ModelConfig(
        d_model=16, num_layers=2, num_heads=2, max_len=16, positions="rope"
    )
    return TrainConfig(**dict(
        model=model, data=str(folder / "base.txt"), out=str(folder / "base"), steps=30,
        batch_size=4, eval_every=30, sample_tokens=0, warmup_steps=3, learning_rate=5e-3,
    ) | changes)  # fmt: skip


def tuned_config(folder, base, name="tuned", **changes):
    (folder / "new.txt").write_text(TEXT.replace("be", "bee").replace("not", "nott"))
    changes.setdefault("task", LanguageTask())
    changes.setdefault("data", str(folder / "new.txt"))
    start = fine_tuning(load_run(base.out).config, base.out, changes["task"])
    return dataclasses.replace(start, **dict(
        out=str(folder / name), lora=LORA, context=12 if base.model.max_len else None,
        batch_size=4, steps=12, eval_every=6, checkpoint_every=5, keep=9, warmup_steps=2,
        learning_rate=1e-2, sample_tokens=0,
    ) | changes)  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    config = base_config(tmp_path_factory.mktemp("base"))
    fit(config)
    return config


@pytest.mark.long
def test_only_adapters_are_trained_and_saved(base, tmp_path):
    config = tuned_config(tmp_path, base)
    result = fit(config)
    lines = [
        json.loads(line) for line in (tmp_path / "tuned/metrics.jsonl").read_text().splitlines()
    ]
    losses = [line["val_loss"] for line in lines if "val_loss" in line]
    assert losses[-1] < losses[0]
    leaves = jax.tree_util.tree_leaves_with_path(result.state.params)
    assert {path[-1].key for path, _ in leaves} == {"a", "b"}
    before = load_run(base.out).params
    _, adapters = load_adapters(config.out, "last")
    after = load_run(config.out, "last").params
    moved = jax.tree.map(lambda x, y: bool((x != y).any()), before, after)
    flat = jax.tree_util.tree_leaves_with_path(moved)
    assert {path[-1].key for path, is_kernel in flat if is_kernel} == {"kernel"}
    query = adapters["decoder"]["block_1"]["attention"]["query"]
    old = np.asarray(before["decoder"]["block_1"]["attention"]["query"]["kernel"], np.float64)
    sum_ = LORA.scale * np.asarray(query["a"], np.float64) @ np.asarray(query["b"], np.float64)
    new = after["decoder"]["block_1"]["attention"]["query"]["kernel"]
    assert_near(new, old + sum_.reshape(old.shape), 1e-6)
    manifest = checkpoint.read_manifest(next((tmp_path / "tuned/checkpoints").glob("step-*")))
    assert not [name for name, *_ in _names(manifest) if "embed" in name or "kernel" in name]


def _names(manifest):
    return json.loads((manifest.path / "manifest.json").read_text())["leaves"]


CASES = {
    "dropout": {},
    "accumulation": dict(accumulation=2),
    "average": dict(ema_decay=0.5),
    "bfloat16 base": dict(lora=dataclasses.replace(LORA, base="bfloat16")),
    "int8 base": dict(lora=dataclasses.replace(LORA, base="int8")),
    "int4 base": dict(lora=dataclasses.replace(LORA, base="int4")),
    "trained": dict(lora=dataclasses.replace(LORA, trained=("embed", "decoder/norm"))),
    "packed": dict(task=LanguageTask(documents="lines")),
}


@pytest.mark.slow
@pytest.mark.long_except("dropout")
@pytest.mark.parametrize("case", CASES)
def test_resumed_adapter_run_is_bit_identical(base, tmp_path, case):
    changes = CASES[case]
    if case == "packed":  # its base has a token that ends a document
        base = base_config(tmp_path, **changes)
        fit(base)
    whole = fit(tuned_config(tmp_path, base, "whole", **changes))
    part = tuned_config(tmp_path, base, "part", **changes)
    calls = iter(range(100))
    stopped = fit(part, stop=lambda: next(calls) == 6)
    assert stopped.interrupted and stopped.step == 7
    again = fit(part, resume=True)
    jax.tree.map(
        assert_same_bits, jax.tree.leaves(again.state.params), jax.tree.leaves(whole.state.params)
    )
    assert again.val_loss == whole.val_loss


@pytest.mark.slow
def test_adapter_loss_matches_loss_with_merged_parameters(base, tmp_path):
    config = tuned_config(tmp_path, base)
    result = fit(config)
    model = load_run(config.out, "last")
    task = load_task(result.config, start_model(base.out).tokenizers, None)
    scores = batch_scores(model.config)
    total = sum(
        np.asarray(scores(model.params, task.prepare(*task.held_out, batch)), np.float64)
        for batch in task.evaluation()
    )
    assert_near(total[0] / total[1], result.val_loss, 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("base_dtype", ["bfloat16", "int8", "int4"])
def test_quantized_base_model_has_nearly_same_loss(base, tmp_path, base_dtype):
    """The state has the same size; the loss before the first step differs only by quantization."""
    whole = tuned_config(tmp_path, base, "whole", steps=1)
    fewer = dataclasses.replace(LORA, base=base_dtype)
    config = tuned_config(tmp_path, base, "fewer", steps=1, lora=fewer)
    results = [fit(one) for one in (whole, config)]
    losses = [result.val_loss for result in results]
    assert losses[0] != losses[1]
    assert abs(losses[0] - losses[1]) < {"bfloat16": 0.01, "int8": 0.02, "int4": 0.3}[base_dtype]
    assert load_run(config.out, "last").params["decoder"]["norm"]["scale"].dtype == jnp.float32


@pytest.mark.long
def test_changed_base_model_is_rejected(base, tmp_path):
    changed_base = dataclasses.replace(base, out=str(tmp_path / "own"), steps=10, eval_every=10)
    fit(changed_base)
    config = tuned_config(tmp_path, changed_base)
    fit(config)
    fit(dataclasses.replace(changed_base, steps=20), resume=True)  # now its best parameters differ
    with pytest.raises(CheckpointError, match=r"own: parameters have sha256 .* run started from"):
        fit(dataclasses.replace(config, steps=20), resume=True)
    with pytest.raises(CheckpointError, match="the run started from"):
        load_run(config.out)


@pytest.mark.long
def test_new_head_is_trained_with_adapters(base, tmp_path):
    rows = ["yes\tbe or not be\nno\tquestion the is\n" for _ in range(20)]
    (tmp_path / "classes.tsv").write_text("".join(rows))
    model = ModelConfig(
        kind="encoder", d_model=16, num_layers=1, num_heads=2, max_len=24, dropout=0.0
    )
    masked = base_config(tmp_path, model=model, task=MaskedTask(), out=str(tmp_path / "masked"))
    fit(masked)
    config = tuned_config(
        tmp_path, masked, task=ClassifyTask(), data=str(tmp_path / "classes.tsv"), steps=60,
        context=24, lora=dataclasses.replace(LORA, trained=("embed",)), learning_rate=2e-2,
        min_learning_rate=1e-3,
    )  # fmt: skip
    result = fit(config)
    whole = set(result.state.params["whole"])
    assert {"classifier/bias", "classifier/kernel", "pooler/kernel", "embed/tokens"} <= whole
    assert result.accuracy == 1.0
    with pytest.raises(ConfigError, match="it also trained classifier/bias, which are not"):
        load_adapters(config.out)


@pytest.mark.long
def test_adapters_can_be_trained_on_encoder_decoder(tmp_path):
    rows = [f"{a}{b}\t{b}{a}\n" for a in "abcd" for b in "efgh"]
    (tmp_path / "pairs.tsv").write_text("".join(rows))
    model = ModelConfig(kind="encoder-decoder", d_model=16, num_layers=1, num_heads=2, max_len=24)
    first = base_config(
        tmp_path, model=model, task=Seq2SeqTask(), data=str(tmp_path / "pairs.tsv"), steps=10
    )
    fit(first)
    config = tuned_config(
        tmp_path, first, task=Seq2SeqTask(), data=first.data, steps=8, context=None
    )
    result = fit(config)
    names = {"/".join(p.key for p in path[1:-1])
             for path, _ in jax.tree_util.tree_leaves_with_path(result.state.params)}  # fmt: skip
    assert {"encoder/block_0/attention/query", "decoder/block_0/cross_attention/key"} <= names
    assert not np.array_equal(
        *(load_run(c.out).params["decoder"]["block_0"]["cross_attention"]["key"]["kernel"]
          for c in (first, config))
    )  # fmt: skip


@pytest.mark.slow
def test_invalid_adapter_configs_raise_error(base, tmp_path):
    config = tuned_config(tmp_path, base)
    alone = dataclasses.replace(config, init_from=None, tokenizer="char")
    with pytest.raises(ConfigError, match="init_from is None: must name the model"):
        fit(alone)
    late = {
        r"targets contains 'qerry', which matches nothing": LoraConfig(targets=("qerry",)),
        r"lora.trained contains 'decoder': .*/kernel has an adapter": dataclasses.replace(
            LORA, trained=("decoder",)
        ),
        r"lora.trained contains 'haed': no parameter has this prefix": dataclasses.replace(
            LORA, trained=("haed",)
        ),
    }
    for line, lora in late.items():
        with pytest.raises(ConfigError, match=line):
            fit(dataclasses.replace(config, lora=lora))
        assert not (tmp_path / "tuned").exists()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA])
def test_adapter_run_resumes_in_looped_or_scanned_stack(base, tmp_path, lora):
    """A step with rate 0 keeps the initial parameters, so the loss is that of the looped run."""

    def began(name, init_from, scan_layers):
        changes = dict(init_from=init_from, lora=lora, steps=1, eval_every=1)
        changes |= dict(learning_rate=1e-20, min_learning_rate=0.0)
        config = tuned_config(tmp_path, base, name, **changes)
        model = dataclasses.replace(config.model, scan_layers=scan_layers)
        return fit(dataclasses.replace(config, model=model)).val_loss

    looped = began("looped", base.out, False)
    assert began("scanned", base.out, True) == pytest.approx(looped, rel=1e-5)
    assert began("back", str(tmp_path / "scanned"), False) == pytest.approx(looped, rel=1e-5)


@pytest.mark.long
def test_enlarged_embedding_table_must_be_trained(base, tmp_path):
    config = tuned_config(tmp_path, base, task=LanguageTask(documents="lines"))  # adds an end token
    with pytest.raises(ConfigError, match=r"lora\.trained lacks 'embed/tokens': it is new"):
        fit(config)
    lora = dataclasses.replace(LORA, trained=("embed",))
    result = fit(dataclasses.replace(config, lora=lora, out=str(tmp_path / "whole"), steps=4))
    assert [*result.state.params["whole"]] == ["embed/tokens"]


@pytest.mark.long
def test_training_can_start_from_adapter_run(base, tmp_path):
    config = tuned_config(tmp_path, base)
    fit(config)
    second = dataclasses.replace(config, init_from=config.out, out=str(tmp_path / "second"))
    result = fit(second)
    assert jnp.isfinite(result.val_loss)
    one, two = (load_run(c.out, "last").params for c in (config, second))
    assert any(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x != y).any()), one, two)))
