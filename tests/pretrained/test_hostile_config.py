"""Hostile config.json files with valid weights: error messages and resource use.

As a script: loads each of them in turn, and prints the largest cost.
"""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hostile_weights import measured
from transformer_jax.config import ConfigError
from transformer_jax.pretrained.load import load_pretrained
from transformer_jax.pretrained.safetensors_folder import CheckpointError

pytestmark = pytest.mark.usefixtures("quick_compilation")

BASE = dict(
    model_type="llama", vocab_size=29, hidden_size=12, intermediate_size=17, num_hidden_layers=2,
    num_attention_heads=3, num_key_value_heads=1, head_dim=6, max_position_embeddings=31,
    rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=True, torch_dtype="float32",
)  # fmt: skip
SHAPES = {
    "self_attn.q_proj": (18, 12), "self_attn.k_proj": (6, 12), "self_attn.v_proj": (6, 12),
    "self_attn.o_proj": (12, 18), "mlp.gate_proj": (17, 12), "mlp.up_proj": (17, 12),
    "mlp.down_proj": (12, 17), "input_layernorm": (12,), "post_attention_layernorm": (12,),
}  # fmt: skip
NUMBERS = 29 * 12 + 12 + 2 * sum(map(math.prod, SHAPES.values()))
INTEGER = "must be an integer from 1 to 2"
FILES = f"but the files have only {NUMBERS} numbers"


def changed(**keys) -> bytes:
    return json.dumps({k: v for k, v in (BASE | keys).items() if v is not ...}).encode()


def rope(**keys) -> bytes:
    return changed(rope_scaling=dict(rope_type="linear", factor=2.0) | keys)


def gemma(**keys) -> bytes:
    return changed(model_type="gemma3_text", **keys)


def qwen(**keys) -> bytes:
    return changed(model_type="qwen2", use_sliding_window=True, **keys)


def text(**literals: str) -> bytes:
    """The base config as JSON, with literal values."""
    parts = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in BASE.items() if k not in literals]
    parts += [f"{json.dumps(k)}: {v}" for k, v in literals.items()]
    return ("{" + ", ".join(parts) + "}").encode()


def lfm2(**keys) -> bytes:
    return changed(
        model_type="lfm2", head_dim=..., rms_norm_eps=..., norm_eps=1e-5, torch_dtype=...,
        block_auto_adjust_ff_dim=False, num_key_value_heads=3, hidden_size=18,
        layer_types=["conv", "full_attention"], **keys,
    )  # fmt: skip


HOSTILE: dict[str, tuple[bytes, str]] = {
    # file contents, and the error after the file's name
    "d_model 1e9": (changed(hidden_size=10**9, head_dim=6), f"hidden_size is 1000000000, {FILES}"),
    "d_ff 1e9": (changed(intermediate_size=10**9), f"intermediate_size is 1000000000, {FILES}"),
    "heads 1e9": (changed(num_attention_heads=10**9, num_key_value_heads=1),
        f"num_attention_heads is 1000000000, {FILES}"),
    "heads times width": (changed(num_attention_heads=1001), "num_heads \\* head_dim is 6006, "),
    "heads 0": (changed(num_attention_heads=0), f"num_attention_heads is 0: {INTEGER}"),
    "heads that do not divide": (changed(num_key_value_heads=2), "num_kv_heads is 2: "),
    "head_dim 2^31-1": (changed(head_dim=2**31 - 1), "must be even and at most"),
    "head_dim 2^31-2": (changed(head_dim=2**31 - 2), f"head_dim is 2147483646, {FILES}"),
    "vocabulary 2^40": (changed(vocab_size=2**40), f"vocab_size is 1099511627776: {INTEGER}"),
    "vocabulary 2^31": (changed(vocab_size=2**31), f"vocab_size is 2147483648: {INTEGER}"),
    "vocabulary 2^30": (changed(vocab_size=2**30), f"vocab_size is 1073741824, {FILES}"),
    "vocabulary of another": (changed(vocab_size=30),
        r"embed_tokens.weight has shape \[29, 12\]: config.json requires \[30,"),
    "convolution of 1e9 tokens": (lfm2(conv_L_cache=10**9),
        f"conv_L_cache is 1000000000, {FILES}"),
    "layers 1e6": (changed(num_hidden_layers=10**6),
        "num_hidden_layers is 1000000: must be at most 20, the number of tensors"),
    "layers 20": (changed(num_hidden_layers=20), "tensor model.layers.2.input_layernorm.weight is"),
    "layers 1e9 in a pattern": (gemma(num_hidden_layers=10**9),
        "num_hidden_layers is 1000000000: "),
    "layers 1e5 of two kinds": (qwen(num_hidden_layers=10**5), "num_hidden_layers is 100000: "),
    "negative": (changed(hidden_size=-12), f"hidden_size is -12: {INTEGER}"),
    "text for a number": (changed(vocab_size="512"), f"vocab_size is '512': {INTEGER}"),
    "true for a number": (changed(num_hidden_layers=True), f"num_hidden_layers is True: {INTEGER}"),
    "a float for an integer": (changed(hidden_size=12.0), f"hidden_size is 12.0: {INTEGER}"),
    "a number for true": (changed(tie_word_embeddings=1),
        "tie_word_embeddings is 1: must be true or false"),
    "null for a number": (changed(hidden_size=None), f"hidden_size is None: {INTEGER}"),
    "missing": (changed(hidden_size=...), "hidden_size is missing"),
    "a list for a number": (changed(vocab_size=[29]), f"vocab_size is \\[29\\]: {INTEGER}"),
    "400 digits": (changed(rope_theta=10**400),
        "rope_theta is 1000.*\\.\\.\\.: must be a number between"),
    "an integer of 400 digits": (changed(vocab_size=10**400),
        f"vocab_size is 1000.*\\.\\.\\.: {INTEGER}"),
    "eps 0": (changed(rms_norm_eps=0), ": rms_norm_eps is 0: must be positive"),
    "unknown key": (changed(hidden_sizes=12), "hidden_sizes is 12: this key is not"),
    "auto_map": (changed(auto_map={"AutoModel": "evil.Model"}),
        "auto_map is .*code in a checkpoint is never run"),
    "quantization_config": (changed(quantization_config={"bits": 4}), "quantization_config is "),
    "unknown model_type": (changed(model_type="evil"), "model_type is 'evil': must be one of"),
    "absent model_type": (changed(model_type=...), "model_type is None: must be one of"),
    "model_type a list": (changed(model_type=["llama"]), "model_type is \\['llama'\\]: must be"),
    "a long model_type": (changed(model_type="x" * 10**6), "model_type is 'x+.{0,4}: must be"),
    "factor 1e400": (text(rope_scaling='{"rope_type": "linear", "factor": 1e400}'),
        "'1e400' is not a finite"),
    "factor -1": (rope(factor=-1), "factor is -1"),
    "factor a list": (rope(factor=[2]), "rope_scaling: factor is \\[2\\]: must be a number"),
    "factor null": (rope(factor=None), "rope_scaling: factor is None: must be at least 1"),
    "factor below 1": (rope(factor=0.5), "rope_scaling: factor is 0.5: .*at least 1"),
    "factor of what is low": (rope(rope_type="llama3", low_freq_factor=0, high_freq_factor=4.0),
        "rope_scaling: low_freq_factor is 0: must be positive"),
    "base 0 beside another": (changed(rope_parameters=dict(rope_type="default", rope_theta=0.0)),
        "rope_parameters: rope_theta is 0.0: must exceed 1"),
    "dropout 1": (changed(attention_dropout=1), ": attention_dropout is 1: must be at least 0"),
    "cap 0": (gemma(final_logit_softcapping=0), ": final_logit_softcapping is 0: must be positive"),
    "scaling a text": (changed(rope_scaling="linear"),
        "rope_scaling is 'linear': must be an object"),
    "unknown scaling": (rope(rope_type="evil"),
        "rope_scaling: rope_type is 'evil': must be one of"),
    "base 0": (changed(rope_theta=-1.0), "rope_theta is -1.0: must exceed 1"),
    "rotated more than all": (changed(partial_rotary_factor=1e308),
        "partial_rotary_factor is 1e\\+308: must be"),
    "rotated 1e18": (changed(partial_rotary_factor=1e18),
        "partial_rotary_factor is 1e\\+18: must be"),
    "longrope of digits": (rope(rope_type="longrope", short_factor=[1, 1, 1],
        long_factor=[1, 1, 10**400]), "long_factor is .*must be a list of numbers"),
    "longrope of a length of 1": (rope(rope_type="longrope", original_max_position_embeddings=1,
        short_factor=[1.0] * 3, long_factor=[1.0] * 3), "original_len is 1: "),
    "yarn divided by 0": (rope(rope_type="yarn", factor=2.718281828459045, mscale=1.0,
        mscale_all_dim=-10.0), "config.json: its numbers are inconsistent"),
    "layer_types too many": (gemma(layer_types=["full_attention"] * 10**4),
        "layer_types is .*must be a list of 2"),
    "layer_types unknown": (gemma(layer_types=["evil", "full_attention"]),
        "layer_types is .*must be a list of 2"),
    "layer_types of lists": (gemma(layer_types=[["full_attention"], {}]),
        "layer_types is .*must be a list of 2"),
    "nested": (text(rope_scaling="[" * 100_000), "nested more than 64 levels deep"),
    "nested junk": (text(rope_scaling='{"a": ' * 60 + "1" + "}" * 60),
        "rope_scaling: a is .*this key is not supported"),
    "many values": (text(id2label="[" + "1," * 200_000 + "1]"), "more than 131072 values"),
    "eight megabytes and a byte": (b" " * (2**23 + 1),
        "has 8388609 bytes: must have at most 8388608"),
    "gpt2's positions": (json.dumps(dict(model_type="gpt2", n_positions=2**31 - 1, n_embd=12,
        n_head=3, n_layer=2, vocab_size=29)).encode(), f"n_positions is 2147483647, {FILES}"),
}  # fmt: skip


def lay(folder: Path) -> Path:
    """Write weights that match BASE."""
    import numpy as np

    from transformer_jax.pretrained.safetensors_folder import write_folder

    tensors = {"model.embed_tokens.weight": (29, 12), "model.norm.weight": (12,)}
    for i in range(2):
        tensors |= {f"model.layers.{i}.{name}.weight": shape for name, shape in SHAPES.items()}
    arrays = ((name, np.full(shape, 0.5, np.float32)) for name, shape in tensors.items())
    write_folder(folder, BASE, arrays)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return lay(tmp_path_factory.mktemp("hostile") / "model")


def test_unmodified_base_folder_is_valid(folder):
    (folder / "config.json").write_bytes(changed())
    config, params = load_pretrained(folder)
    assert config.d_model == 12 and params["embed"]["tokens"].shape == (29, 12)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_config_error_names_file_and_key(folder, name):
    content, message = HOSTILE[name]
    (folder / "config.json").write_bytes(content)
    with pytest.raises((ConfigError, CheckpointError), match=re.escape(str(folder))) as caught:
        load_pretrained(folder)
    message_text = str(caught.value)
    assert re.search(message, message_text), message_text
    assert "\n" not in message_text and len(message_text) < 1000


@pytest.mark.slow
def test_hostile_configs_use_bounded_time_and_memory(tmp_path):
    """They also open only files of the folder and run no code."""
    script = [sys.executable, "-m", "tests.pretrained.test_hostile_config", str(tmp_path / "model")]
    root = Path(__file__).parents[2]
    out = subprocess.run(script, capture_output=True, text=True, check=True, cwd=root)
    found = json.loads(out.stdout)
    assert set(found) == set(HOSTILE)
    assert len(found) >= 40
    for name, (seconds, grown, touched) in found.items():
        assert touched == [], name
        assert seconds < 1, name
        assert grown <= 64 * 2**20, name


def main(folder: Path) -> None:
    lay(folder)
    load_pretrained(folder)
    touched: list[str] = []
    root = os.path.realpath(folder)

    def watch(event: str, arguments: tuple) -> None:
        ran = event in ("os.system", "os.exec", "subprocess.Popen", "import", "socket.connect")
        opened = event == "open" and isinstance(arguments[0], str | bytes)
        if ran or (opened and not os.path.realpath(os.fsdecode(arguments[0])).startswith(root)):
            touched.append(f"{event} {arguments!r:.200}")

    def refused() -> None:
        touched.clear()
        try:
            load_pretrained(folder)
        except (ConfigError, CheckpointError):
            return
        raise AssertionError("was read")

    found = {}
    sys.addaudithook(watch)
    for name, (content, _) in HOSTILE.items():
        (folder / "config.json").write_bytes(content)
        cost = measured(refused)
        found[name] = (*cost, [what for what in touched if "/proc/self" not in what])
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
