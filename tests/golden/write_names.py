"""Write names.json: the names of tensors and tokens in transformers.

    python -m tests.golden.write_names

The tensors are those of a saved model with one layer of each kind in each family; the tokens are
the default roles of the tokenizer classes. Needs torch and transformers.
"""

from __future__ import annotations

import inspect
import json
import tempfile
from pathlib import Path
from typing import Any

import transformers
from safetensors import safe_open

from tests.pretrained.test_published_written import BERT, ENCODERS, LLAMA, SIZES
from tests.support.published import saved as save_model
from transformer_jax.pretrained.families import FAMILIES
from transformer_jax.tokenizers.classes import CLASSES

VOCAB, FILE = 61, Path(__file__).with_name("names.json")
TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=0)

ROLES = "bos", "eos", "unk", "sep", "pad", "cls", "mask"
LAYERS = {"num_hidden_layers", "num_layers", "n_layer", "n_layers"}


def saved(family: str) -> dict[str, Any]:
    """Save a small model of a family; return its config and the names of its tensors."""
    sizes = SIZES.get(family, BERT if family in ENCODERS else LLAMA)
    content = sizes | TOKENS | dict(vocab_size=VOCAB)
    content |= dict.fromkeys(LAYERS & content.keys(), len(content.get("layer_types", "1")))
    if family == "mpnet":
        content["pad_token_id"] = 1
    config = transformers.AutoConfig.for_model(family, **content)
    auto = transformers.AutoModelForCausalLM
    if config.is_encoder_decoder:
        auto = transformers.AutoModelForSeq2SeqLM
    elif family in ENCODERS:
        auto = transformers.AutoModelForMaskedLM
    with tempfile.TemporaryDirectory() as folder:
        save_model(auto.from_config(config), Path(folder))
        with safe_open(f"{folder}/model.safetensors", "numpy") as file:
            names = sorted(file.keys())
        written = json.loads(Path(folder, "config.json").read_text())
    written.pop("transformers_version")
    return dict(config=written, tensors=names)


def roles(name: str) -> dict[str, str]:
    """Return the default token of each role of a tokenizer class."""
    parameters = inspect.signature(getattr(transformers, f"{name}Tokenizer").__init__).parameters
    given = {role: parameters.get(f"{role}_token") for role in ROLES}
    return {role: str(p.default) for role, p in given.items() if p and p.default is not None}


if __name__ == "__main__":
    found = dict(
        transformers=transformers.__version__,
        families={family: saved(family) for family in FAMILIES},
        classes={name: of for name in CLASSES if (of := roles(name))},
    )
    FILE.write_text(json.dumps(found, sort_keys=True, separators=(",", ":")) + "\n")
