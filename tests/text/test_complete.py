"""Text in, text out, with what a loader gives."""

import jax
import numpy as np
import pytest

import transformer_jax as tj
from transformer_jax import text
from transformer_jax.models.factory import build
from transformer_jax.tokenizers.trained import CharTokenizer

CONFIG = tj.ModelConfig(
    vocab_size=11, d_model=8, num_layers=1, num_heads=2, max_len=17, init_std=0.7
)
MODEL = text.TextModel(
    CONFIG, tj.init_params(CONFIG, jax.random.key(3)), CharTokenizer("abcdefghijk")
)


@pytest.mark.slow
def test_a_text_is_completed_by_the_likeliest_tokens_up_to_a_stop_string():
    ids = list(MODEL.tokenizer.encode("bad"))
    for _ in range(7):
        logits = build(CONFIG).apply({"params": MODEL.params}, np.array([ids]))[0]
        ids.append(int(np.asarray(logits)[0, -1].argmax()))
    expected = MODEL.tokenizer.to_bytes(ids[3:]).decode()
    assert text.complete(MODEL, "bad", 7) == expected
    assert text.complete(MODEL, "bad", 7, sampler=tj.Greedy()) == expected
    end = expected[4]
    assert text.complete(MODEL, "bad", 7, stop=end) == expected[: expected.index(end)]
    with pytest.raises(ValueError, match="key is None"):
        text.complete(MODEL, "bad", 7, sampler=tj.Sample())
