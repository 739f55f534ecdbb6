"""A published model, fine-tuned with adapters: merged in transformers, and separate in PEFT."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = [
    pytest.mark.slow,  # adapters also have fast tests without torch
    pytest.mark.filterwarnings("ignore"),  # warnings of torch, transformers, and peft
]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402

from tests.support.tolerances import assert_near  # noqa: E402
from transformer_jax.cli import convert  # noqa: E402
from transformer_jax.config import LoraConfig, fine_tuning  # noqa: E402
from transformer_jax.loading import load_run  # noqa: E402
from transformer_jax.models.factory import build  # noqa: E402
from transformer_jax.pretrained.load import pretrained_config  # noqa: E402
from transformer_jax.tokenizers.utf8 import byte_letters  # noqa: E402
from transformer_jax.training.loop import fit  # noqa: E402

LOGITS = 1e-4
TEXT = "to be or not to be that is the question\n" * 40
FAMILIES = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=256, n_embd=24,
        n_layer=2, n_head=4, n_positions=32, initializer_range=0.2, bos_token_id=0,
        eos_token_id=0)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256,
        hidden_size=24, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
        initializer_range=0.2, bos_token_id=0, eos_token_id=0)),
    "neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(vocab_size=256,
        hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, initializer_range=0.2, bos_token_id=0, eos_token_id=0)),
}  # fmt: skip


def published(folder, family):
    """Write a model of transformers and a byte tokenizer to a folder."""
    torch.manual_seed(3)
    model = FAMILIES[family]()
    model.save_pretrained(folder)
    letters = Tokenizer(models.BPE(vocab=byte_letters(), merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=letters)
    fast.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_fine_tuned_model_matches_transformers_and_peft(tmp_path, family):
    base = published(tmp_path / "base", family)
    (tmp_path / "text.txt").write_text(TEXT)
    start = str(tmp_path / "base")
    lora = LoraConfig(rank=4, alpha=8.0, targets="all-linear", dropout=0.05)
    config = dataclasses.replace(
        fine_tuning(pretrained_config(start), start), data=str(tmp_path / "text.txt"),
        out=str(tmp_path / "run"), steps=30, batch_size=4, context=24, eval_every=30,
        learning_rate=1e-2, warmup_steps=3, sample_tokens=0, lora=lora,
    )  # fmt: skip
    fit(config)
    tokens = np.random.default_rng(1).integers(0, 256, (2, 17))
    model = load_run(config.out)
    ours, _ = build(model.config).apply({"params": model.params}, jnp.array(tokens, jnp.int32))
    with torch.no_grad():
        before = base(torch.tensor(tokens)).logits
    assert float(np.abs(np.asarray(ours) - before.numpy()).max()) > 0.5  # it has been trained

    run = ["--model", config.out]
    assert convert.main([*run, "--to", str(tmp_path / "merged")]) == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        assert_near(merged(torch.tensor(tokens)).logits.numpy(), ours, LOGITS)

    assert convert.main([*run, "--to", str(tmp_path / "adapter"), "--adapter"]) == 0
    both = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        assert_near(both(torch.tensor(tokens)).logits.numpy(), ours, LOGITS)
    assert both.peft_config["default"].base_model_name_or_path == start
    alone = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    with torch.no_grad():
        assert_near(alone(torch.tensor(tokens)).logits.numpy(), ours, LOGITS)


def test_exporting_adapter_from_run_without_adapters_is_rejected(tmp_path, capsys):
    published(tmp_path / "base", "gpt2")
    (tmp_path / "text.txt").write_text(TEXT)
    start = str(tmp_path / "base")
    config = dataclasses.replace(
        fine_tuning(pretrained_config(start), start), data=str(tmp_path / "text.txt"),
        out=str(tmp_path / "run"), steps=2, batch_size=2, context=8, sample_tokens=0,
        warmup_steps=1,
    )  # fmt: skip
    fit(config)
    status = convert.main(["--model", config.out, "--to", str(tmp_path / "out"), "--adapter"])
    assert status == 2
    assert "it has no adapters, because lora is None" in capsys.readouterr().err
    assert jax.tree.leaves(load_run(config.out).params)
