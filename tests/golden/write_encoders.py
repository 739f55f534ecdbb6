"""Write the golden encoders next to this file: `python tests/golden/write_encoders.py [NAME ...]`.

Each is a folder as saved by `transformers`; golden.npz contains tokens, positions, types if the
model has them, and the resulting logits or classes. Needs torch and transformers.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from tests.support.published import positions, randomised, reopened, saved, tokens  # noqa: E402

V, T = 53, 13


def bert_masked_lm():
    """Return a model with two layers and two token types; one row is padded right, another left."""
    auto = transformers.BertForMaskedLM
    config = transformers.BertConfig(
        vocab_size=V, hidden_size=12, num_attention_heads=3, num_hidden_layers=2,
        intermediate_size=19, max_position_embeddings=17,
    )  # fmt: skip
    return randomised(auto(config), seed=11), auto


def distilbert_classes():
    """Return a model with one layer and three classes; padding on the left is ignored."""
    auto = transformers.DistilBertForSequenceClassification
    config = transformers.DistilBertConfig(
        vocab_size=V, dim=12, n_heads=3, n_layers=1, hidden_dim=19, max_position_embeddings=17,
        num_labels=3,
    )  # fmt: skip
    model = randomised(auto(config), seed=12)
    with torch.no_grad():  # well-separated classes
        model.pre_classifier.weight.mul_(4)
        model.classifier.weight.mul_(4)
    return model, auto


RECIPES = {"bert_masked_lm": bert_masked_lm, "distilbert_classes": distilbert_classes}


def golden(model) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(20_261_121)
    valid = np.ones((3, T), bool)
    valid[1, 8:] = valid[2, :5] = False
    ids = np.where(valid, tokens(rng, V, 3, T), 0).astype(np.int32)
    out = dict(tokens=ids, positions=positions(valid))
    kinds = getattr(model.config, "type_vocab_size", None)
    if kinds is not None:
        out["types"] = rng.integers(0, kinds, ids.shape, dtype=np.int32)

    def run(rows, columns) -> np.ndarray:
        given = dict(
            input_ids=torch.tensor(ids[rows, columns]).long(),
            attention_mask=torch.tensor(valid[rows, columns]).long(),
            position_ids=torch.tensor(np.maximum(out["positions"], 0)[rows, columns]).long(),
        )
        if "types" in out:
            given["token_type_ids"] = torch.tensor(out["types"][rows, columns]).long()
        with torch.no_grad():
            return model(**given)["logits"].numpy()

    if "types" in out:
        out["logits"] = run(slice(None), slice(None))
    else:
        alone = run(slice(2, 3), slice(5, None))
        out["classes"] = np.concatenate([run(slice(2), slice(None)), alone])
    return out


def main() -> None:
    for name in sys.argv[1:] or RECIPES:
        model, auto = RECIPES[name]()
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        saved(model, folder)
        np.savez_compressed(folder / "golden.npz", **golden(reopened(folder, auto)))


if __name__ == "__main__":
    main()
