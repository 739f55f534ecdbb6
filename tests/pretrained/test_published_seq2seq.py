"""T5, BART, and similar models compared with `transformers`, with random parameters.

The positions of a source are its columns, as in transformers: after left padding, the first token
of BART and Marian has the position of its column, not 0. So `source_positions` are the columns,
and -1 for padding; T5 uses only distances, so it could also count from 0.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.published import (
    LOGITS,
    apply,
    assert_round_trip,
    assert_same_gradients,
    assert_same_logits,
    hidden_states,
    positions,
    randomised,
    reopened,
    saved,
    tokens,
    torch,
    transformers,
    views,
    weights_of,
)
from transformer_jax import (
    Ban,
    BanSequences,
    Force,
    ForceLast,
    LengthPenalty,
    NoRepeatNGram,
    beam_search,
    build,
    generate,
    make_step,
)
from transformer_jax.decoding.batch_rows import fork
from transformer_jax.models.positions import sinusoidal
from transformer_jax.pretrained.families import FAMILIES
from transformer_jax.pretrained.families.bart import sinusoids
from transformer_jax.pretrained.load import load_pretrained
from transformer_jax.pretrained.safetensors_folder import CheckpointError

AUTO = transformers.AutoModelForSeq2SeqLM
VOCAB, ROWS, NEW = 89, 3, 12
TARGETS = np.array([11, 7, 2])
TABLES = "model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"
PAIRS = [(a, b) for a in range(VOCAB - 1) for b in range(a % 7, VOCAB, 7)] + [(3, 1, 4), (17,)]

T5 = dict(vocab_size=VOCAB, d_model=26, d_kv=5, d_ff=37, num_heads=3, decoder_start_token_id=0)
SIZES = dict(
    vocab_size=VOCAB, encoder_attention_heads=3, decoder_attention_heads=3,
    encoder_ffn_dim=37, decoder_ffn_dim=37, max_position_embeddings=61,
)  # fmt: skip


pytestmark = [
    pytest.mark.slow,  # folders and golden numbers also have fast tests without torch
    pytest.mark.usefixtures("quick_compilation"),
]

OUTPUTS = (".o.weight", ".wo.weight", ".out_proj.weight", ".fc2.weight")


def lively(kind: Any, config: Any, seed: int) -> Any:
    """Return a random model with large branches; otherwise it repeats the last token."""
    torch.manual_seed(seed)
    model = randomised(kind(config), seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(OUTPUTS):
                parameter *= 3.0
    return model


def t5(seed: int, ends: float, **options: Any) -> Any:
    model = lively(
        transformers.T5ForConditionalGeneration, transformers.T5Config(**T5, **options), seed
    )
    with torch.no_grad():
        model.shared.weight[1] *= ends  # the end token, so that texts end
    return model


def flan(seed: int, ends: float, **options: Any) -> Any:
    """Return a Flan-T5, which has a separate output matrix."""
    model = t5(seed, 1.0, tie_word_embeddings=False, feed_forward_proj="gated-gelu", **options)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(model.shared.weight.shape, generator=generator) * 26**-0.5
    rows[1] *= ends
    model.lm_head.weight = torch.nn.Parameter(rows)
    return model


def published(folder: Path) -> None:
    """Rewrite config.json in Google's style for T5 1.1 and Flan-T5, unlike transformers 5."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    del content["scale_decoder_outputs"], content["dense_act_fn"], content["is_gated_act"]
    content |= dict(tie_word_embeddings=False, n_positions=512, output_past=True)
    path.write_text(json.dumps(content))


def bart(seed: int, ends: float, **options: Any) -> Any:
    config = transformers.BartConfig(d_model=27, **SIZES, **options)
    return biased(transformers.BartForConditionalGeneration, config, seed, 2, ends)


def marian(seed: int, ends: float, **options: Any) -> Any:
    config = transformers.MarianConfig(
        d_model=42, pad_token_id=VOCAB - 1, decoder_start_token_id=VOCAB - 1, **SIZES, **options
    )
    return biased(transformers.MarianMTModel, config, seed, 0, ends)


def mbart(seed: int, ends: float, **options: Any) -> Any:
    config = transformers.MBartConfig(d_model=27, **SIZES, **options)
    return biased(transformers.MBartForConditionalGeneration, config, seed, 2, ends)


def published_mbart(folder: Path) -> None:
    """Add the keys of fairseq's options to config.json, which transformers 5 omits."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | dict(
        add_bias_logits=False, add_final_layer_norm=True, normalize_before=True,
        normalize_embedding=True, static_position_embeddings=False, extra_pos_embeddings=2,
    )  # fmt: skip
    path.write_text(json.dumps(content))


def pegasus(seed: int, ends: float, **options: Any) -> Any:
    config = transformers.PegasusConfig(d_model=42, activation_function="relu", **SIZES, **options)
    model = biased(transformers.PegasusForConditionalGeneration, config, seed, 1, ends)
    with torch.no_grad():
        for side in (model.model.encoder, model.model.decoder):
            side.embed_positions.weight.copy_(side.embed_positions.create_weight())
    return model


def published_pegasus(folder: Path) -> None:
    """Rewrite a Pegasus like `published_mbart`, without the tables of sinusoids."""
    tensors = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if name not in TABLES}
    assert len(kept) == len(tensors) - 2
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    content = json.loads(path.read_text()) | dict(
        add_bias_logits=False, add_final_layer_norm=True, normalize_before=True,
        normalize_embedding=False, static_position_embeddings=True, extra_pos_embeddings=1,
        force_bos_token_to_be_generated=False, classif_dropout=0.0,
    )  # fmt: skip
    path.write_text(json.dumps(content))


def m2m100(seed: int, ends: float, **options: Any) -> Any:
    """Return an M2M-100, whose embedding makes the end likely, since its logits have no bias."""
    config = transformers.M2M100Config(d_model=42, **SIZES | options)
    model = lively(transformers.M2M100ForConditionalGeneration, config, seed)
    with torch.no_grad():
        model.model.shared.weight[2] *= ends
    return model


def biased(kind: Any, config: Any, seed: int, end: int, ends: float) -> Any:
    model = lively(kind, config, seed)
    model.final_logits_bias.normal_(generator=torch.Generator().manual_seed(seed))
    model.final_logits_bias[0, end] += ends
    return model


@dataclass(frozen=True)
class Case:
    build: Callable[[], Any]
    source: int
    start: int
    end: int
    edit: Callable[[Path], None] | None = None
    options: Any = dataclasses.field(default_factory=dict)
    """Additional options for `generate` in `transformers`."""
    processors: tuple[Any, ...] = ()
    """The equivalent options of this library."""


# `transformers` has no cache for a T5 whose decoder is deeper than its encoder.
CASES = {
    "t5": Case(
        lambda: t5(2, 3.0, num_layers=2, num_decoder_layers=1), source=600, start=0, end=1,
    ),
    "flan-t5": Case(
        lambda: flan(
            5, 3.0, num_layers=1, relative_attention_num_buckets=10,
            relative_attention_max_distance=37, layer_norm_epsilon=1e-3,
        ),
        source=600, start=0, end=1, edit=published,
    ),
    "bart": Case(
        lambda: bart(3, 3.5, encoder_layers=1, decoder_layers=2), source=61, start=2, end=2,
        processors=(ForceLast(NEW, 2),),
    ),
    "scaled bart": Case(
        lambda: bart(
            3, 5.0, encoder_layers=2, decoder_layers=1, scale_embedding=True,
            activation_function="relu",
        ),
        source=53, start=2, end=2, options=dict(forced_bos_token_id=5),
        processors=(Force(5), ForceLast(NEW, 2)),
    ),
    "marian": Case(
        lambda: marian(
            4, 4.0, encoder_layers=2, decoder_layers=1, scale_embedding=True,
            activation_function="swish",
        ),
        source=61, start=VOCAB - 1, end=0, options=dict(bad_words_ids=[[VOCAB - 1], [7]]),
        processors=(Ban(VOCAB - 1, 7), ForceLast(NEW, 0)),
    ),
    "plain marian": Case(
        lambda: marian(3, 4.0, encoder_layers=1, decoder_layers=2, activation_function="relu"),
        source=47, start=VOCAB - 1, end=0,
        options=dict(forced_eos_token_id=None, bad_words_ids=[list(pair) for pair in PAIRS]),
        processors=(BanSequences(*PAIRS),),
    ),
    "mbart": Case(  # it starts with the target language, like mBART-50
        lambda: mbart(
            3, 2.5, encoder_layers=2, decoder_layers=1, scale_embedding=True,
            decoder_start_token_id=2,
        ),
        source=61, start=2, end=2, edit=published_mbart,
        options=dict(forced_bos_token_id=VOCAB - 2),
        processors=(Force(VOCAB - 2), ForceLast(NEW, 2)),
    ),
    "m2m100": Case(  # a generated padding token would have no position in transformers
        lambda: m2m100(7, 4.0, encoder_layers=2, decoder_layers=1), source=61, start=2, end=2,
        options=dict(forced_bos_token_id=VOCAB - 2, bad_words_ids=[[1]]),
        processors=(Force(VOCAB - 2), Ban(1)),
    ),
    "pegasus": Case(
        lambda: pegasus(7, 2.0, encoder_layers=1, decoder_layers=2, scale_embedding=True),
        source=61, start=0, end=1, edit=published_pegasus, processors=(ForceLast(NEW, 1),),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Loaded:
    folder: Path
    model: Any
    config: Any
    quick: Any
    """The config with the implementation that compiles fastest."""
    params: Any
    source: np.ndarray
    at: np.ndarray  # i32[B, S], its positions
    valid: np.ndarray  # bool[B, S]: left padding, right padding, none
    target: np.ndarray
    real: np.ndarray  # bool[B, T]
    state: Any

    @property
    def theirs(self) -> dict[str, Any]:
        """The source as arguments for `transformers`."""
        return dict(
            input_ids=torch.tensor(self.source), attention_mask=torch.tensor(self.valid.astype(int))
        )

    @property
    def both(self) -> dict[str, Any]:
        return self.theirs | dict(
            decoder_input_ids=torch.tensor(self.target),
            decoder_attention_mask=torch.tensor(self.real.astype(int)),
        )


def begin(config: Any, params: Any, source: np.ndarray, at: np.ndarray) -> Any:
    """Return the cache after the source."""
    model = build(config)

    def read(params):
        variables = {"params": params}
        return model.apply(variables, source, positions=at, capacity=NEW + 1, method="init_cache")

    return jax.jit(read)(params)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    @cache
    def load(name: str) -> Loaded:
        case, folder = CASES[name], tmp_path_factory.mktemp("model")
        saved(case.build(), folder)
        if case.edit is not None:
            case.edit(folder)
        rng = np.random.default_rng(list(CASES).index(name))
        source = tokens(rng, VOCAB, ROWS, case.source)
        columns = np.arange(case.source)[None]
        third = case.source // 3
        first, end = np.array([third, 0, 0]), np.array([case.source, 2 * third, case.source])
        valid = (columns >= first[:, None]) & (columns < end[:, None])
        real = np.arange(TARGETS.max())[None] < TARGETS[:, None]
        target = tokens(rng, VOCAB, *real.shape)
        config, params = load_pretrained(folder)
        model = reopened(folder, AUTO)
        at = np.where(valid, columns, -1).astype(np.int32)
        quick = dataclasses.replace(config, implementation="xla")
        state = begin(quick, params, source, at)
        return Loaded(folder, model, config, quick, params, source, at, valid, target, real, state)

    return load


every_case = pytest.mark.parametrize("name", CASES)


@every_case
def test_logits_hidden_states_and_weights_match_transformers(name, loaded):
    x = loaded(name)
    with torch.no_grad():
        want = x.model(**x.both, output_hidden_states=True, output_attentions=True)
    config = x.config if name == "t5" else x.quick  # the default implementation
    read = jax.jit(partial(build(config).apply, capture=views(config)))
    logits, _, seen = read(
        {"params": x.params}, x.target, source=x.source, source_positions=x.at,
        positions=positions(x.real),
    )  # fmt: skip
    memory = apply(config, x.params, "encode")(x.source, positions=x.at)
    assert_same_logits(logits, want.logits, x.real)
    assert_same_layers(hidden_states(seen), want.decoder_hidden_states, x.real)
    assert_same_layers(hidden_states(seen, "encoder/"), want.encoder_hidden_states, x.valid)
    assert_same_layers(memory[:, None], (want.encoder_last_hidden_state,), x.valid)
    for branch, theirs, real in (
        ("attention", want.decoder_attentions, x.real),
        ("cross_attention", want.cross_attentions, x.real),
        ("encoder/attention", want.encoder_attentions, x.valid),
    ):
        has_output = jnp.moveaxis(weights_of(seen, branch), 3, 2)
        assert_same_layers(has_output, their_weights(theirs), real)


def their_weights(layers: tuple[Any, ...]) -> list[Any]:  # [B, N, T, S] -> [B, T, N, S]
    return [layer.movedim(2, 1) for layer in layers]


def assert_same_layers(got: jax.Array, want: Any, real: np.ndarray) -> None:
    """Compare [B, L, T, ...] with L arrays [B, T, ...] at the valid positions [B, T]."""
    assert got.shape[1] == len(want) > 0
    for i, layer in enumerate(want):
        one, two = np.asarray(got[:, i])[real], layer.numpy()[real]
        assert one.shape == two.shape and np.isfinite(two).all() and two.std() > 1e-4
        assert np.abs(one - two).max() <= LOGITS


@pytest.mark.parametrize("name", ["t5", "flan-t5", "bart", "marian", "mbart", "m2m100", "pegasus"])
def test_seq2seq_gradients_match_transformers(name, loaded):
    x = loaded(name)
    rng = np.random.default_rng(3)
    labels = tokens(rng, VOCAB, *x.target.shape)
    model = build(x.quick)

    def loss(params):
        logits, _ = model.apply(
            {"params": params}, x.target, source=x.source, source_positions=x.at,
            positions=positions(x.real),
        )  # fmt: skip
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        picked = jnp.take_along_axis(log_probs, labels[..., None], axis=-1)[..., 0]
        return -jnp.where(x.real, picked, 0.0).sum() / x.real.sum()

    logits = x.model(**x.both).logits[torch.tensor(x.real)]
    want = torch.nn.functional.cross_entropy(logits, torch.tensor(labels[x.real]).long())
    family = json.loads((x.folder / "config.json").read_text())["model_type"]
    table = FAMILIES[family].table(x.config)
    # `transformers` 5.24 gives the sinusoids of a loaded Marian a gradient; 5.23 gave them none.
    constants = TABLES if family in ("marian", "pegasus") else ()
    assert_same_gradients(x.config, x.params, loss, x.model, want, table, constants)


def new_tokens(sequence: Any, end: int) -> list[int]:
    """Return a row of transformers' `generate`, without its start and the padding at its end."""
    row = sequence.tolist()[1:]
    return row[: row.index(end) + 1] if end in row else row


@every_case
def test_greedy_text_matches_transformers(name, loaded):
    x, case = loaded(name), CASES[name]
    with torch.no_grad():
        want = x.model.generate(
            **x.theirs, max_new_tokens=NEW, num_beams=1, do_sample=False, no_repeat_ngram_size=3,
            **case.options,
        )  # fmt: skip
    got = generate(
        make_step(build(x.quick)), x.params, np.full((ROWS, 1), case.start), fork(x.state, 1),
        num_tokens=NEW, stop=case.end, processors=(NoRepeatNGram(3), *case.processors),
    )  # fmt: skip
    rows = [new_tokens(row, case.end) for row in want]
    assert [row.tolist() for row in got.rows()] == rows
    assert len({tuple(row) for row in rows}) > 1 and max(map(len, rows)) > 3


@every_case
def test_beam_search_matches_transformers(name, loaded):
    """transformers' `length_penalty` is `LengthPenalty` here, for the new tokens and the end.
    The searches agree if theirs is exact: `early_stopping="never"` and normalised scores."""
    x, case, seen = loaded(name), CASES[name], set()
    for alpha in (0.0, 1.0):
        with torch.no_grad():
            want = x.model.generate(
                **x.theirs, max_new_tokens=NEW, num_beams=4, num_return_sequences=3,
                do_sample=False, early_stopping="never", length_penalty=alpha,
                renormalize_logits=True, no_repeat_ngram_size=3, return_dict_in_generate=True,
                output_scores=True, **case.options,
            )  # fmt: skip
        got = beam_search(
            make_step(build(x.quick)), x.params, np.full((ROWS, 1), case.start), fork(x.state, 1),
            num_tokens=NEW, num_beams=4, num_results=3, stop=case.end,
            processors=(NoRepeatNGram(3), *case.processors), length_penalty=LengthPenalty(alpha),
        )  # fmt: skip
        lengths = np.asarray(got.lengths).reshape(-1)
        texts = np.asarray(got.tokens).reshape(-1, NEW)
        rows = [text[:length].tolist() for text, length in zip(texts, lengths, strict=True)]
        assert rows == [new_tokens(row, case.end) for row in want.sequences]
        scores = want.sequences_scores.numpy()
        np.testing.assert_allclose(got.scores.reshape(-1), scores, atol=LOGITS, rtol=0)
        seen |= set(lengths.tolist())
    assert len(seen) > 1


@every_case
def test_seq2seq_folder_round_trips(name, loaded, tmp_path):
    x = loaded(name)
    assert_round_trip(x.folder, tmp_path, AUTO, **x.both)


def test_t5_output_matrix_matches_transformers(tmp_path):
    """transformers 5 always writes tie_word_embeddings=true."""
    rng = np.random.default_rng(0)
    source, target = tokens(rng, VOCAB, 2, 13), tokens(rng, VOCAB, 2, 5)
    both = dict(input_ids=torch.tensor(source), decoder_input_ids=torch.tensor(target))
    tied = t5(8, 1.0, num_layers=1, num_decoder_layers=2, tie_word_embeddings=False)
    with torch.no_grad():
        tied.shared.weight *= 0.2  # because logits are not scaled
    for name, model in (("tied", tied), ("untied", flan(9, 1.0, num_layers=1))):
        folder = saved(model, tmp_path / name)
        content = json.loads((folder / "config.json").read_text())
        assert content["tie_word_embeddings"] and not content["scale_decoder_outputs"]
        config, params = load_pretrained(folder)
        assert config.tie_embeddings == (name == "tied") and config.logit_scale is None
        with torch.no_grad():
            want = reopened(folder, AUTO)(**both).logits
        assert_same_logits(apply(config, params)(target, source=source)[0], want)
        assert_round_trip(folder, tmp_path / f"{name} again", AUTO, **both)


@pytest.mark.parametrize("tie_key", [True, False])
@pytest.mark.parametrize("has_output", [False, True])
def test_mt5_output_matrix_depends_only_on_file(has_output, tie_key, tmp_path):
    """Published files set false and contain one; transformers 5 ties all others."""
    options = dict(vocab_size=VOCAB, d_model=26, d_kv=5, d_ff=37, num_heads=3, num_layers=1)
    config = transformers.MT5Config(**options, num_decoder_layers=2, decoder_start_token_id=0)
    model = lively(transformers.MT5ForConditionalGeneration, config, 4)
    with torch.no_grad():
        model.shared.weight *= 0.2  # because logits are not scaled
    if has_output:
        model.lm_head.weight = torch.nn.Parameter(model.shared.weight.flip(0))
    folder = saved(model, tmp_path / "mt5")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | dict(tie_word_embeddings=tie_key)))
    config, params = load_pretrained(folder)
    assert config.tie_embeddings is not has_output and config.logit_scale is None
    rng = np.random.default_rng(2)
    source, target = tokens(rng, VOCAB, 2, 13), tokens(rng, VOCAB, 2, 5)
    both = dict(input_ids=torch.tensor(source), decoder_input_ids=torch.tensor(target))
    with torch.no_grad():
        want = reopened(folder, AUTO)(**both).logits
    assert_same_logits(apply(config, params)(target, source=source)[0], want)
    assert_round_trip(folder, tmp_path, AUTO, folder, **both)


@pytest.mark.parametrize("kind", ["T5", "MT5"])
def test_encoder_only_model_matches_transformers(kind, tmp_path):
    options: Any = dict(feed_forward_proj="relu", num_layers=2) if kind == "T5" else {}
    config = getattr(transformers, f"{kind}Config")(**T5 | dict(num_layers=2) | options)
    model = lively(getattr(transformers, f"{kind}EncoderModel"), config, 5)
    folder = saved(model, tmp_path / "encoder")
    config, params = load_pretrained(folder)
    assert config.kind == "encoder"
    source, valid = tokens(np.random.default_rng(3), VOCAB, 2, 40), np.ones((2, 40), bool)
    valid[1, 31:] = False
    mask = torch.tensor(valid).long()
    auto = getattr(transformers, f"{kind}EncoderModel")
    with torch.no_grad():
        want = reopened(folder, auto)(torch.tensor(source), mask).last_hidden_state.numpy()
    got = np.asarray(apply(config, params, "encode")(source, positions=positions(valid)))
    assert want.std() > 0.3
    assert np.abs(got - want)[valid].max() <= LOGITS
    assert_round_trip(folder, tmp_path, auto, folder, input_ids=torch.tensor(source))


def test_two_vocabulary_marian_matches_transformers(tmp_path):
    rng = np.random.default_rng(1)
    options: Any = dict(share_encoder_decoder_embeddings=False, decoder_vocab_size=97)
    options |= dict(encoder_layers=1, decoder_layers=1)
    folder = saved(marian(6, 0.0, **options), tmp_path / "marian")
    config, params = load_pretrained(folder)
    assert (config.source_vocab_size, config.vocab_size) == (VOCAB, 97)
    source, target = tokens(rng, VOCAB, 2, 13), tokens(rng, 97, 2, 5)
    both = dict(input_ids=torch.tensor(source), decoder_input_ids=torch.tensor(target))
    with torch.no_grad():
        want = reopened(folder, AUTO)(**both).logits
    assert_same_logits(apply(config, params)(target, source=source)[0], want)
    assert_round_trip(folder, tmp_path / "again", AUTO, **both)


def test_m2m100_positions_skip_padding(loaded):
    """Padding tokens on either side have no position, as in transformers."""
    x = loaded("m2m100")
    source = np.where(x.valid, x.source, 1)
    target = tokens(np.random.default_rng(5), VOCAB, ROWS, 7)
    mask = torch.tensor(x.valid.astype(int))
    with torch.no_grad():
        want = x.model(torch.tensor(source), mask, decoder_input_ids=torch.tensor(target)).logits
    at = positions(x.valid)
    assert (at[0] != x.at[0]).any()
    got = apply(x.quick, x.params)(target, source=source, source_positions=at)[0]
    assert_same_logits(got, want)


def test_m2m100_accepts_position_tables_from_old_files(loaded, tmp_path):
    x = loaded("m2m100")
    table = x.model.model.encoder.embed_positions.weights.numpy()
    assert table.shape == (63, 42) and (table[1] == 0).all() and table.std() > 0.1
    tensors = load_file(x.folder / "model.safetensors")
    names = [name.replace("weight", "weights") for name in TABLES]
    (tmp_path / "config.json").write_bytes((x.folder / "config.json").read_bytes())
    for second in (table, np.roll(table, 1, axis=0)):
        tables = dict(zip(names, (table, second), strict=True))
        save_file(tensors | tables, tmp_path / "model.safetensors")
        if second is table:
            chex.assert_trees_all_equal(load_pretrained(tmp_path)[1], x.params, strict=True)
        else:
            with pytest.raises(
                CheckpointError, match=f"{names[1]} differs from the values that config.json"
            ):
                load_pretrained(tmp_path)


def test_pegasus_accepts_position_tables_from_transformers(tmp_path):
    folder = saved(pegasus(5, 3.0, encoder_layers=1, decoder_layers=1), tmp_path / "pegasus")
    table = load_file(folder / "model.safetensors")[TABLES[0]]
    params = load_pretrained(folder)[1]
    assert table.shape == (61, 42) and "positions" not in params["embed"]
    published_pegasus(folder)
    chex.assert_trees_all_equal(load_pretrained(folder)[1], params, strict=True)


def test_marian_sinusoids_match_transformers(loaded):
    x = loaded("marian")
    table = x.model.model.encoder.embed_positions.weight.detach().numpy()
    ours = sinusoidal(jnp.arange(61), x.config.d_model, layout="halves")
    assert table.shape == (61, 42) and table.std() > 0.1
    np.testing.assert_allclose(ours, table, atol=1e-6, rtol=0)
    implied = sinusoids(x.config, (61, 42))
    assert implied is not None and sinusoids(x.config, (61, 41)) is None
    np.testing.assert_allclose(implied, table, atol=1e-6, rtol=0)
    longer = dataclasses.replace(x.config, max_len=67)  # without a table, any length works
    assert sinusoids(longer, (67, 42)) is not None
