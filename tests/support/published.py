"""Comparisons of small random models of `transformers` with ours, after saving and loading.

The oracle is `transformers` with torch on a CPU, its eager attention, in f32. Outputs at padding
are never compared.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file  # noqa: E402

from transformer_jax.models.factory import build  # noqa: E402
from transformer_jax.models.places import places  # noqa: E402
from transformer_jax.pretrained.families.table import Layout, joined  # noqa: E402
from transformer_jax.pretrained.load import load_pretrained  # noqa: E402
from transformer_jax.pretrained.save import save_pretrained  # noqa: E402

torch.set_num_threads(1)  # the models are small, and other tests run at the same time
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

LOGITS = 1e-4
"""Largest absolute difference in f32, because sums have another order."""
GRADIENTS = 1e-3
"""Largest difference, relative to the largest gradient of a parameter."""


def randomised(model: Any, seed: int, spread: float = 0.3) -> Any:
    """Move all parameters far from their initial values, so that each of them matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [x for name, x in model.named_buffers() if name.endswith("correction_bias")]
        for parameter in (*model.parameters(), *biases):
            noise = torch.randn(parameter.shape, generator=generator)
            width = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else spread
            parameter.add_(noise * width)
    return model.eval()


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    if model.config.model_type == "olmo_hybrid":
        rename_as_published(folder, model.config)
    if model.config.model_type == "kimi_linear":
        tensors = load_file(folder / "model.safetensors")  # also see the family's old_suffixes
        dense = r"block_sparse_moe\.(gate_proj|up_proj|down_proj)\."
        tensors = {re.sub(dense, r"mlp.\1.", name): x for name, x in tensors.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def rename_as_published(folder: Path, config: Any) -> None:
    """Rewrite OLMo Hybrid's tensors; transformers 5.24 saves them with other names and splits."""
    tensors = load_file(folder / "model.safetensors")
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    for name in [*tensors]:
        if name.endswith("q_conv1d.weight"):
            names = [name.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
            parts = np.split(np.concatenate([tensors[n] for n in names]), [keys, 2 * keys])
            tensors |= zip(names, parts, strict=True)
        today = name.replace("attention_layer_norm", "input_layernorm")
        today = today.replace("feedforward_layer_norm", "post_attention_layernorm")
        tensors[today] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def reopened(folder: Path, auto: Any) -> Any:
    """Load a folder with `transformers` and its plain attention."""
    return auto.from_pretrained(folder, attn_implementation="eager").eval()


def tokens(rng: np.random.Generator, vocab: int, rows: int, length: int) -> np.ndarray:
    """Draw ids that are not special."""
    return rng.integers(3, vocab - 1, (rows, length), dtype=np.int32)


def positions(valid: np.ndarray) -> np.ndarray:  # bool[B, T] -> i32[B, T]
    """Number the real tokens from 0, and padding with -1."""
    return np.where(valid, np.cumsum(valid, axis=1) - 1, -1).astype(np.int32)


def apply(config: Any, params: Any, method: str | None = None):
    """Return the jitted model with bound parameters."""
    model = build(config)
    return jax.jit(lambda *a, **k: model.apply({"params": params}, *a, **k, method=method))


def views(config: Any) -> tuple[str, ...]:
    """Return the places of every layer's hidden state and attention weights."""
    ends = "embedding", "/residual", "final_norm", "attention/weights"
    return tuple(name for name in places(config) if name.endswith(ends))


def of_blocks(captured: dict[str, Any], side: str, place: str) -> list[Any]:
    """Return the values of a place in each block, in the order of the blocks."""
    found = {re.fullmatch(rf"{side}block_(\d+)/{place}", name): name for name in captured}
    blocks = {int(match[1]): captured[name] for match, name in found.items() if match}
    return [blocks[i] for i in sorted(blocks)]


def hidden_states(captured: dict[str, Any], side: str = "") -> np.ndarray:  # [B, L + 1, T, D]
    """Return the stream before each block of a stack, and the stack's output."""
    blocks = of_blocks(captured, side, "residual")
    last = captured.get(f"{side}final_norm", blocks[-1])
    return np.stack([captured[f"{side}embedding"], *blocks[:-1], last], axis=1)


def weights_of(
    captured: dict[str, Any], branch: str = "attention"
) -> np.ndarray:  # [B, L, N, T, S]
    """Return the attention weights of a branch of each block."""
    side = "encoder/" if branch.startswith("encoder/") else ""
    place = f"(latent_)?{branch.removeprefix(side)}/weights"
    return np.stack(of_blocks(captured, side, place), axis=1)


def assert_same_logits(got: Any, want: Any, real: np.ndarray | None = None) -> None:
    """Compare logits, and the likeliest token, at every real position."""
    got, want = np.asarray(got), want.detach().numpy()
    assert got.shape == want.shape
    real = np.ones(got.shape[:2], bool) if real is None else real
    got, want = got[real], want[real]
    assert np.isfinite(want).all() and want.std() > 0.3, "logits are too flat to compare"
    assert np.abs(got - want).max() <= LOGITS
    best = np.sort(want, axis=-1)
    clear = best[..., -1] - best[..., -2] > 2 * LOGITS
    assert clear.mean() > 0.95
    assert (got.argmax(-1) == want.argmax(-1))[clear].all()


def assert_round_trip(
    folder: Path, tmp_path: Path, auto: Any, like: Path | None = None, **inputs: Any
) -> None:
    """Write a folder, read it again, and compare it with the original.

    Names, shapes and bits must be the same, and `transformers` must compute the same logits.
    """
    config, params = load_pretrained(folder)
    again = tmp_path / "again"
    save_pretrained(again, config, params, like=like)
    one, two = load_file(folder / "model.safetensors"), load_file(again / "model.safetensors")
    assert {k: (v.shape, v.dtype) for k, v in one.items()} == {
        k: (v.shape, v.dtype) for k, v in two.items()
    }
    assert all(one[name].tobytes() == two[name].tobytes() for name in one)
    back, loaded = load_pretrained(again)
    assert back == config
    chex.assert_trees_all_equal(loaded, params, strict=True)
    with torch.no_grad():
        first, second = (reopened(f, auto)(**inputs) for f in (folder, again))
    key = "logits" if "logits" in first else "last_hidden_state"
    assert torch.equal(first[key], second[key])


def assert_same_gradients(
    config: Any, params: Any, loss: Any, model: Any, want_loss: Any, table: Any,
    constants: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Compare the gradient of every tensor, in the layout of the file, with that of torch.

    `loss(params)` and the torch scalar `want_loss` are the same function; `table` is that of the
    family. Our model does not train the tensors named in `constants`.
    """
    model.zero_grad()
    want_loss.backward()
    theirs = {
        name: p.grad
        for name, p in model.named_parameters()
        if p.grad is not None and name not in constants
    }
    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    assert abs(float(value) - float(want_loss.detach())) <= 1e-5 * max(1.0, abs(float(value)))
    ours = flatten_dict(gradient, sep="/")
    parts: dict[str, list[np.ndarray]] = {}
    layouts: dict[str, list[Layout]] = {}
    for mapping in table:
        piece = mapping.layout.write(np.asarray(ours[mapping.param]))
        parts.setdefault(mapping.tensor, []).append(piece)
        layouts.setdefault(mapping.tensor, []).append(mapping.layout)
    compared = 0
    for name, pieces in parts.items():
        if name not in theirs:
            continue
        got = joined(layouts[name], pieces)
        want = theirs[name].numpy()
        top = np.abs(want).max()
        assert np.abs(got - want).max() <= GRADIENTS * max(top, 1e-3), name
        compared += 1
    assert compared == len(theirs)
