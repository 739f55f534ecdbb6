"""Write golden encoder-decoders: a small random T5 and Marian, with the results of torch.

    python -m tests.golden.write_seq2seq

Needs the extra `parity`. Each folder contains config.json, model.safetensors and case.npz: a source
(-1 in `source_positions` is padding), a target, its logits, and continuations of the start token:
greedy, and the best of 4 beams by mean log-probability without repeated pairs of tokens; -1 follows
the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
ROWS, SOURCE, TARGET, NEW = 3, 23, 7, 9


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=41, d_model=14, d_kv=5, d_ff=19, num_layers=2, num_decoder_layers=1, num_heads=3,
        relative_attention_num_buckets=8, relative_attention_max_distance=13,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = random(transformers.T5ForConditionalGeneration, config, 3)
    with torch.no_grad():
        model.shared.weight[1] *= 1.5  # the end token, so that texts end
    return model


def marian() -> Any:
    config = transformers.MarianConfig(
        vocab_size=41, d_model=18, encoder_layers=1, decoder_layers=2, encoder_attention_heads=3,
        decoder_attention_heads=3, encoder_ffn_dim=23, decoder_ffn_dim=23,
        max_position_embeddings=31, activation_function="swish", scale_embedding=True,
        pad_token_id=40, decoder_start_token_id=40, forced_eos_token_id=None,
    )  # fmt: skip
    model = random(transformers.MarianMTModel, config, 3)
    model.final_logits_bias.normal_(generator=torch.Generator().manual_seed(2))
    model.final_logits_bias[0, 0] += 2.0
    return model


def random(kind: Any, config: Any, seed: int) -> Any:
    """Move all parameters far from their initial values, so that each of them matters."""
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            width = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            out = name.endswith((".o.weight", ".wo.weight", ".out_proj.weight", ".fc2.weight"))
            parameter.add_((4 if out else 1) * width * torch.randn(parameter.shape))
    return model


def write(name: str, model: Any) -> None:
    folder = HERE / name
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    (folder / "generation_config.json").unlink(missing_ok=True)
    kind = transformers.AutoModelForSeq2SeqLM
    model = kind.from_pretrained(folder, attn_implementation="eager").eval()
    config, rng = model.config, np.random.default_rng(7)
    source = rng.integers(2, 40, (ROWS, SOURCE), dtype=np.int32)
    target = rng.integers(2, 40, (ROWS, TARGET), dtype=np.int32)
    columns = np.arange(SOURCE, dtype=np.int32)
    real = np.stack([columns >= 5, columns < 11, columns >= 0])
    given = dict(input_ids=torch.tensor(source), attention_mask=torch.tensor(real.astype(int)))
    options: Any = dict(max_new_tokens=NEW, do_sample=False, no_repeat_ngram_size=2)
    with torch.no_grad():
        logits = model(**given, decoder_input_ids=torch.tensor(target)).logits
        greedy = model.generate(**given, num_beams=1, **options)
        beams = model.generate(
            **given, num_beams=4, early_stopping="never", length_penalty=1.0,
            renormalize_logits=True, return_dict_in_generate=True, output_scores=True, **options,
        )  # fmt: skip
    np.savez(
        folder / "case.npz",
        source=source,
        source_positions=np.where(real, columns, -1).astype(np.int32),
        target=target,
        logits=logits.numpy(),
        start=np.int32(config.decoder_start_token_id),
        end=np.int32(config.eos_token_id),
        greedy=texts(greedy, config.eos_token_id),
        beams=texts(beams.sequences, config.eos_token_id),
        scores=beams.sequences_scores.numpy(),
    )


def texts(rows: Any, end: int) -> np.ndarray:  # i32[B, NEW]
    """Remove the start token, and replace tokens after the end by -1."""
    found = np.full((len(rows), NEW), -1, np.int32)
    for i, row in enumerate(rows.numpy()[:, 1:]):
        length = list(row).index(end) + 1 if end in row else len(row)
        found[i, :length] = row[:length]
    return found


if __name__ == "__main__":
    write("t5", t5())
    write("marian", marian())
