"""Write small random models of `transformers` and their logits, for tests that run without it.

    PYTHONPATH=. python tests/golden/write.py [NAME ...]

writes NAME/config.json, NAME/model.safetensors and NAME/golden.npz for the named recipes, by
default for all: inputs, the logits at some positions and the likeliest token at every position.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.support.published import LOGITS, randomised

HERE = Path(__file__).parent
LIMIT = 60_000
"""Largest file, in bytes."""


@dataclass(frozen=True)
class Recipe:
    """A model and its inputs.

    These are `tokens` and, if the model needs them, `valid` (False is padding), `source`,
    `source_valid` and `types`.
    """

    model: Callable[[], Any]
    arrays: Callable[[np.random.Generator], dict[str, np.ndarray]]
    dtype: torch.dtype = torch.float32
    """Dtype of the file; the logits are computed from its numbers in f32."""


def _ids(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(3, 60, shape).astype(np.int32)


def _padded(rng: np.random.Generator, length: int, starts: list[int]) -> dict[str, np.ndarray]:
    """Draw rows with padding on the left."""
    tokens = _ids(rng, len(starts), length)
    return dict(tokens=tokens, valid=np.arange(length) >= np.array(starts)[:, None])


def _gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=61, n_embd=24, n_layer=2, n_head=3, n_positions=48, n_inner=40
    )
    return transformers.GPT2LMHeadModel(config)


def _llama() -> Any:
    rope = dict(rope_type="llama3", rope_theta=10_000.0, factor=8.0, low_freq_factor=1.0)
    rope |= dict(high_freq_factor=4.0, original_max_position_embeddings=128)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=1024,
        tie_word_embeddings=False, rope_parameters=rope,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _gemma3() -> Any:
    near = dict(rope_type="default", rope_theta=100.0)
    far = dict(rope_type="linear", rope_theta=10_000.0, factor=4.0)
    config = transformers.Gemma3TextConfig(
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=1, head_dim=8, max_position_embeddings=512,
        sliding_window=7, query_pre_attn_scalar=11,
        layer_types=[f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding")],
        rope_parameters=dict(sliding_attention=near, full_attention=far),
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config)


RECIPES = {
    "gpt2": Recipe(_gpt2, lambda rng: _padded(rng, 48, [0, 5])),
    "llama": Recipe(_llama, lambda rng: dict(tokens=_ids(rng, 1, 600))),
    "gemma3": Recipe(_gemma3, lambda rng: _padded(rng, 96, [0, 17]), torch.bfloat16),
}


def _arguments(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return the arrays under the argument names of `transformers`."""
    names = dict(tokens="input_ids", valid="attention_mask", types="token_type_ids")
    if "source" in arrays:
        names = dict(tokens="decoder_input_ids", valid="decoder_attention_mask")
        names |= dict(source="input_ids", source_valid="attention_mask")
    found = {names[name]: torch.tensor(x).long() for name, x in arrays.items()}
    if "valid" in arrays and "source" not in arrays and "types" not in arrays:
        found["position_ids"] = found["attention_mask"].cumsum(1).sub(1).clamp(min=0)
    return found


def write(name: str, recipe: Recipe) -> None:
    folder, rng = HERE / name, np.random.default_rng(len(name))
    torch.manual_seed(0)
    randomised(recipe.model(), seed=0).to(recipe.dtype).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    auto = getattr(transformers, type(recipe.model()).__name__)
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    arrays = recipe.arrays(rng)
    with torch.no_grad():
        logits = model(**_arguments(arrays)).logits.numpy()
    two = np.sort(logits, axis=-1)[..., -2:]
    clear = (two[..., 1] - two[..., 0] > 2 * LOGITS) & arrays.get("valid", True)
    assert clear.mean() > 0.8 and logits.std() > 0.3
    length = logits.shape[1]
    at = np.unique(np.append(rng.integers(length, size=12), length - 1)).astype(np.int32)
    top = np.where(clear, logits.argmax(-1), -1).astype(np.int32)
    np.savez_compressed(folder / "golden.npz", at=at, logits=logits[:, at], top=top, **arrays)
    for file in folder.iterdir():
        assert file.stat().st_size < LIMIT, file
        print(file.relative_to(HERE), file.stat().st_size)


if __name__ == "__main__":
    for name in sys.argv[1:] or RECIPES:
        write(name, RECIPES[name])
