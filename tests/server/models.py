"""Small untrained model of bytes with a chat template, for tests of the server."""

import functools
import json
import time
from contextlib import contextmanager

import jax
import numpy as np

import transformer_jax as tj
from transformer_jax.loading import TextModel
from transformer_jax.server.engine import Engine
from transformer_jax.text.language_model import LanguageModel
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.utf8 import byte_letters

TEMPLATE = (
    "{% for m in messages %}{{ m.role[:1] }}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


@functools.cache
def params_of(config):
    params = tj.init_params(config, jax.random.key(3))
    table = params["embed"]["tokens"]
    # IDs without text would be likely tokens
    return {**params, "embed": {**params["embed"], "tokens": table.at[258:].multiply(5)}}


@functools.cache
def tiny(*, template: bool = True, states: bool = False) -> LanguageModel:
    """Return a model of byte pairs with an end token and a padded vocabulary."""
    vocab = byte_letters() | {"ab": 256, "<e>": 257}
    level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    definition = {
        "model": {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]]},
        "pre_tokenizer": {"type": "ByteLevel", **level},
        "decoder": {"type": "ByteLevel", **level},
        "added_tokens": [
            {"id": 257, "content": "<e>", "special": True, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False}
        ],
    }  # fmt: skip
    tokenizer = PretrainedTokenizer(
        json.dumps(definition), chat_templates=(("default", TEMPLATE),) if template else (),
        roles=(("eos", "<e>"),), stop_ids=(257,),
    )  # fmt: skip
    config = tj.ModelConfig(
        vocab_size=261, d_model=8, num_layers=1, num_heads=2, max_len=61, positions="rope",
        init_std=0.7, mixers=("gated_delta",) if states else None,
        gated_delta=tj.GatedDelta(num_key_heads=2, num_value_heads=2) if states else None,
    )  # fmt: skip
    model = TextModel(config, params_of(config), tokenizer, (257,))
    return LanguageModel(model, "/home/somebody/secret")


def is_idle(engine, seconds: float = 20) -> bool:
    """Wait until no request waits or runs, and return whether all slots are free."""
    until = time.monotonic() + seconds
    while engine.waiting or engine.running:
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return not np.asarray(engine.batcher.slots.active).any()


@contextmanager
def running(model: LanguageModel, **options):
    """Run an engine for the duration of a test."""
    engine = Engine(model, **options)
    engine.start()
    try:
        yield engine
    finally:
        if engine.alive:
            engine.stop()
