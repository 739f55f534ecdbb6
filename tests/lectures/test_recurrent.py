"""Tests of recurrent models: the formulas of the papers, packing, decoding and errors."""

import dataclasses
import itertools
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support.tolerances import FORWARD_F32, assert_near, assert_same_bits
from transformer_jax.config import ConfigError, RecurrentConfig
from transformer_jax.decoding.batch_rows import fork
from transformer_jax.decoding.generation import generate, stream
from transformer_jax.decoding.samplers import Sample
from transformer_jax.decoding.step import make_step
from transformer_jax.lectures import recurrent, vocabulary
from transformer_jax.lectures.recurrent import RecurrentStep, init_recurrent_state
from transformer_jax.models.factory import build, init_params, num_params
from transformer_jax.training.losses import cross_entropy

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROWS, TOKENS, SOURCE, VOCAB, SOURCE_VOCAB = 3, 11, 7, 31, 23
LENGTHS = np.array([11, 3, 7], np.int32)
SOURCE_LENGTHS = np.array([4, 7, 1], np.int32)
SOURCE_VALID = np.arange(SOURCE)[None] < SOURCE_LENGTHS[:, None]

LSTM = RecurrentConfig(vocab_size=VOCAB, d_embed=5, d_hidden=17, num_layers=2)
GRU = dataclasses.replace(LSTM, cell="gru", d_embed=17, num_layers=1, tie_embeddings=True)
PLAIN = dataclasses.replace(LSTM, source_vocab_size=SOURCE_VOCAB, cell="gru")
ADDITIVE = dataclasses.replace(
    PLAIN, attention="additive", bidirectional=True, d_attention=13, num_layers=1
)
GENERAL = dataclasses.replace(PLAIN, attention="general", bidirectional=True, cell="lstm")
DOT = dataclasses.replace(PLAIN, attention="dot", cell="lstm", num_layers=1)
CONFIGS = {
    "lstm": LSTM, "gru": GRU, "plain": PLAIN, "additive": ADDITIVE, "general": GENERAL, "dot": DOT
}  # fmt: skip

RNN = dataclasses.replace(LSTM, cell="rnn")
STATE = dataclasses.replace(DOT, context="state", cell="rnn")
CONTEXTS = {
    "rnn": RNN,
    "dot input": dataclasses.replace(DOT, context="input", cell="rnn", num_layers=2),
    "general input": dataclasses.replace(GENERAL, context="input", num_layers=1),
    "additive output": dataclasses.replace(ADDITIVE, context="output"),
    "dot state": STATE,
    "general state": dataclasses.replace(GENERAL, context="state"),
    "additive state": dataclasses.replace(ADDITIVE, context="state", cell="gru"),
}

every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
every_context = pytest.mark.parametrize(
    "config", [*CONFIGS.values(), *CONTEXTS.values()], ids=[*CONFIGS, *CONTEXTS]
)
with_source = pytest.mark.parametrize(
    "config", [PLAIN, ADDITIVE, GENERAL, DOT], ids=["plain", "additive", "general", "dot"]
)


def parameters(config: RecurrentConfig, seed: int = 1, scale: float = 1.5):
    """Draw random parameters without zeros."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        noise = rng.standard_normal(leaf.shape).astype(np.float32)
        if path[-1].key in ("tokens", "output"):
            return noise
        return noise * (0.4 if leaf.ndim == 1 else scale * leaf.shape[0] ** -0.5)

    return jax.tree_util.tree_map_with_path(draw, shapes(config))


@cache
def shapes(config: RecurrentConfig):
    return jax.eval_shape(partial(init_params, config), jax.random.key(0))


def draw_tokens(columns: int = TOKENS, rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(17).integers(0, VOCAB, (rows, columns), dtype=np.int32)


def draw_source(rows: int = ROWS) -> np.ndarray:
    source = np.random.default_rng(19).integers(0, SOURCE_VOCAB, (rows, SOURCE), dtype=np.int32)
    return np.where(SOURCE_VALID[:rows], source, 0)


@partial(jax.jit, static_argnums=0)
def run(config: RecurrentConfig, params, tokens, state, valid):
    """Run a step, compiled once per shape."""
    return RecurrentStep(build(config))(params, tokens, state, valid=valid)


@partial(jax.jit, static_argnums=0)
def read_source(config: RecurrentConfig, params, source, valid):
    return build(config).apply({"params": params}, source, valid=valid, method="init_state")


def begin(config: RecurrentConfig, params, rows=slice(None), valid=SOURCE_VALID):
    """Return the state before the first target token."""
    source, valid = draw_source()[rows], valid[rows]
    if config.source_vocab_size is None:
        return init_recurrent_state(config, len(source))
    return read_source(config, params, source, valid)


# The formulas of the papers in float64, one row and one token at a time


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    return np.exp(x - x.max()) / np.exp(x - x.max()).sum()


def oracle_cell(kind: str, p, carry, x):
    """Return the next carry: (c, h) of an LSTM (Gers et al. 2000), or (h,) of an RNN or a GRU.

    The GRU is the variant of Cho et al. that multiplies by r after the product with U_n.
    """

    def sums(gate: str):
        x_part, h_part = p["i" + gate], p["h" + gate]
        return (
            x @ x_part["kernel"] + x_part.get("bias", 0.0),
            carry[-1] @ h_part["kernel"] + h_part.get("bias", 0.0),
        )

    if kind == "rnn":
        return (np.tanh(sum(sums(""))),)
    if kind == "lstm":
        i, f, o = (sigmoid(sum(sums(gate))) for gate in "ifo")
        c = f * carry[0] + i * np.tanh(sum(sums("g")))
        return c, o * np.tanh(c)
    r, z = (sigmoid(sum(sums(gate))) for gate in "rz")
    from_x, from_h = sums("n")
    return ((1 - z) * np.tanh(from_x + r * from_h) + z * carry[-1],)


def oracle_zero(config):
    """Return the initial carry of a cell."""
    return (np.zeros(config.d_hidden),) * (2 if config.cell == "lstm" else 1)


def oracle_layer(config, p, i: int, x):
    """Return the outputs and the last carries of layer i, in one or both directions."""
    forward = backward = oracle_zero(config)
    out, back = [], []
    for vector in x:
        forward = oracle_cell(config.cell, p[f"cell_{i}"], forward, vector)
        out.append(forward[-1])
    if not config.bidirectional:
        return out, forward, None
    for vector in reversed(x):
        backward = oracle_cell(config.cell, p[f"back_{i}"], backward, vector)
        back.insert(0, backward[-1])
    return [np.concatenate(pair) for pair in zip(out, back, strict=True)], forward, backward


def oracle_encode(config, p, source):
    """Return the states [S, M] and the decoder's initial carries of one row without padding."""
    x, carries = [p["tokens"][token] for token in source], []
    for i in range(config.num_layers):
        x, forward, backward = oracle_layer(config, p, i, x)
        if backward is not None:
            bridge = p[f"bridge_{i}"]
            ends = np.concatenate([*forward, *backward])
            start = np.tanh(ends @ bridge["kernel"] + bridge["bias"])
            forward = tuple(np.split(start, len(forward)))
        carries.append(forward)
    return np.array(x), carries


def oracle_attend(config, p, states, query):
    """Return the context [M] and the weights [S] of one query [H]."""
    if config.attention == "additive":
        scores = np.tanh(query @ p["w_query"] + states @ p["w_key"]) @ p["v"]
    elif config.attention == "general":
        scores = states @ (query @ p["w"])
    else:
        scores = states @ query
    weights = softmax(scores)
    return weights @ states, weights


def oracle_read(config, params, tokens, source=None):
    """Return logits [T, V], attention weights [T, S] and last carries of one unpadded row."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    embed, p, states = params["embed"], params["decoder"], None
    carries = [oracle_zero(config)] * config.num_layers
    if source is not None:
        states, carries = oracle_encode(config, params["encoder"], source)
    attends = config.attention is not None
    use = config.context or ("input" if config.attention == "additive" else "output")
    logits, all_weights = [], []
    for token in tokens:
        x = embed["tokens"][token]
        if attends and use == "input":
            context, weights = oracle_attend(config, p, states, carries[-1][-1])
            x = np.concatenate([x, context])
        for i in range(config.num_layers):
            carries[i] = oracle_cell(config.cell, p[f"cell_{i}"], carries[i], x)
            x = carries[i][-1]
        if attends and use != "input":
            context, weights = oracle_attend(config, p, states, x)
        if attends:
            all_weights.append(weights)
            x = np.tanh(np.concatenate([context, x]) @ p["read_out"]["kernel"])
        if attends and use == "state":
            carries[-1] = (*carries[-1][:-1], x)
        table = embed["tokens"] if config.tie_embeddings else embed["output"]
        logits.append(table @ x + embed["bias"])
    return np.array(logits), np.array(all_weights), carries


def oracle_forward(config, params, tokens, source=None):
    return oracle_read(config, params, tokens, source)[:2]


def row_source(config, row: int):
    if config.source_vocab_size is None:
        return None
    return draw_source()[row, : SOURCE_LENGTHS[row]]


def oracle_row(config, params, tokens, row: int):
    return oracle_forward(config, params, tokens, row_source(config, row))


@pytest.mark.slow
@every_context
def test_forward_pass_matches_formulas(config):
    params, tokens = parameters(config), draw_tokens()
    everything = np.ones(tokens.shape, bool)
    logits, state = run(config, params, tokens, begin(config, params), everything)
    assert logits.shape == (ROWS, TOKENS, VOCAB) and logits.dtype == jnp.float32
    np.testing.assert_array_equal(state.length, [TOKENS] * ROWS)
    for row in range(ROWS):
        want, weights = oracle_row(config, params, tokens[row], row)
        assert_near(logits[row], want, 3 * FORWARD_F32)
        if config.attention is not None:
            last = np.zeros(SOURCE)
            last[: SOURCE_LENGTHS[row]] = weights[-1]
            assert_near(state.weights[row], last, 3 * FORWARD_F32)
            assert not np.asarray(state.weights)[row, SOURCE_LENGTHS[row] :].any()
    assert (state.weights is None) == (config.attention is None)


@pytest.mark.slow
@pytest.mark.long_except("lstm")
@every_config
def test_logits_at_indices_match_full_forward(config):
    params, tokens = parameters(config), draw_tokens()
    at = np.array([[TOKENS - 1], [2], [0]], np.int32)
    step, state = RecurrentStep(build(config)), begin(config, params)
    got, after = jax.jit(step.read)(params, tokens, state, at)
    assert got.shape == (ROWS, 1, VOCAB)
    for row in range(ROWS):
        want, _ = oracle_row(config, params, tokens[row], row)
        assert_near(got[row], want[at[row]], 3 * FORWARD_F32)
    whole = run(config, params, tokens, state, np.ones(tokens.shape, bool))[1]
    assert_near(jax.tree.leaves(after.carry)[0], jax.tree.leaves(whole.carry)[0], FORWARD_F32)


@pytest.mark.slow
@pytest.mark.parametrize("config", [*CONFIGS.values(), STATE], ids=[*CONFIGS, "dot state"])
def test_padded_chunks_match_full_forward(config):
    """Each row has padding at different positions; padding changes no bit of the state."""
    params, rng = parameters(config), np.random.default_rng(23)
    state = begin(config, params)
    read = [[] for _ in range(ROWS)]
    logits = [[] for _ in range(ROWS)]
    for turn, count in enumerate([TOKENS, 1, 1, TOKENS, 1, TOKENS]):
        tokens = rng.integers(0, VOCAB, (ROWS, count), dtype=np.int32)
        valid = rng.random((ROWS, count)) < 0.4
        valid[turn % ROWS] = False
        before = state
        out, state = run(config, params, tokens, state, valid)
        for row in range(ROWS):
            read[row] += tokens[row, valid[row]].tolist()
            logits[row] += list(np.asarray(out)[row, valid[row]])
        for new, old in zip(jax.tree.leaves(state), jax.tree.leaves(before), strict=True):
            assert_same_bits(new[turn % ROWS], old[turn % ROWS])
    np.testing.assert_array_equal(state.length, [len(row) for row in read])
    assert len({len(row) for row in read}) > 1 and min(len(row) for row in read) > 3
    for row in range(ROWS):
        want, weights = oracle_row(config, params, read[row], row)
        assert_near(np.array(logits[row]), want, 3 * FORWARD_F32)
        if config.attention is not None:
            got = np.asarray(state.weights)[row, : SOURCE_LENGTHS[row]]
            assert_near(got, weights[-1], 3 * FORWARD_F32)


@pytest.mark.slow
@pytest.mark.long_except("dot", "gru")
@every_config
def test_greedy_decode_matches_full_forward(config):
    """Compare each token with the argmax of the float64 formulas; the prompts are ragged."""
    prompt, new, step = draw_tokens(), 13, RecurrentStep(build(config))
    arguments = dict(num_tokens=new, lengths=LENGTHS)
    for seed in range(40):  # until no row repeats a cycle, which would hide a lost state
        params = parameters(config, seed, scale=3.0)
        state = begin(config, params)
        tokens = np.asarray(generate(step, params, prompt, fork(state, 1), **arguments).tokens)
        assert tokens.shape == (ROWS, new)
        if all(len(set(row.tolist())) > 3 for row in tokens):
            break
    else:
        raise AssertionError("every seed repeats a cycle")
    for row, length in enumerate(LENGTHS):
        whole = np.concatenate([prompt[row, :length], tokens[row]])
        logits, _ = oracle_row(config, params, whole[:-1], row)
        best = logits[length - 1 :]
        gap = np.diff(np.sort(best, axis=-1)[:, -2:], axis=-1)
        assert gap.min() > 1e-5, "a tie would make the comparison ambiguous"
        np.testing.assert_array_equal(tokens[row], best.argmax(axis=-1))
    if config in (LSTM, ADDITIVE):
        streamed = stream(step, params, prompt, state, **arguments)
        np.testing.assert_array_equal(np.stack(list(streamed), axis=1), tokens)


@pytest.mark.slow
@pytest.mark.parametrize("config", [LSTM, ADDITIVE], ids=["lstm", "additive"])
def test_output_row_does_not_depend_on_other_rows(config):
    params, tokens = parameters(config), draw_tokens()
    valid = np.arange(TOKENS)[None] < LENGTHS[:, None]
    logits, state = run(config, params, tokens, begin(config, params), valid)
    row = slice(1, 2)
    start = begin(config, params, row)
    single, after = run(config, params, tokens[row, :3], start, valid[row, :3])  # without padding
    assert_near(single, logits[row, :3], FORWARD_F32)
    for leaf, batch in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        assert_near(leaf, batch[row], FORWARD_F32)


@pytest.mark.slow_except("dot rnn")
@pytest.mark.parametrize(
    "config", [ADDITIVE, DOT, dataclasses.replace(DOT, cell="rnn")],
    ids=["additive", "dot", "dot rnn"],
)  # fmt: skip
def test_decoding_donates_state_but_not_caller_arrays(config):
    params, source = parameters(config), jnp.asarray(draw_source())
    prompt, valid = jnp.asarray(draw_tokens()[:, :1]), jnp.asarray(SOURCE_VALID)
    # not compiled, because a compiled program would copy the arrays
    state = read_source.__wrapped__(config, params, source, valid)
    generate(make_step(build(config)), params, prompt, state, num_tokens=2)
    assert state.memory.states.is_deleted()
    assert not any(x.is_deleted() for x in (source, valid, prompt))


@pytest.mark.slow_except("additive rnn")
@pytest.mark.long_except("additive*")
@pytest.mark.parametrize(
    "config", [ADDITIVE, dataclasses.replace(ADDITIVE, cell="rnn"), DOT],
    ids=["additive", "additive rnn", "dot"],
)  # fmt: skip
def test_source_padding_does_not_affect_output(config):
    """Padding after, between or before the tokens, with NaN embeddings; forward and backward."""
    params, tokens = parameters(config), draw_tokens()
    source, valid = draw_source(), np.array(SOURCE_VALID)
    source = np.where(valid, np.where(source == 1, 2, source), 1)
    source[1], valid[1] = [1, 5, 1, 6, 1, 7, 8], [False, True, False, True, False, True, True]
    model = build(config)

    def loss(params):
        logits, state = model.apply({"params": params}, tokens, source=source, source_valid=valid)
        return (logits**2).mean(), (logits, state)

    learn = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, (want, _)), want_slopes = learn(params)
    nonfinite = jax.tree.map(np.array, params)
    nonfinite["encoder"]["tokens"][1] = np.nan
    (_, (logits, state)), slopes = learn(nonfinite)
    assert_same_bits(logits, want)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    chex.assert_trees_all_equal(slopes, want_slopes)
    assert not np.asarray(slopes["encoder"]["tokens"])[1].any()
    assert np.asarray(slopes["encoder"]["tokens"])[5].any()
    row, _ = oracle_forward(config, params, tokens[1], [5, 6, 7, 8])
    assert_near(want[1], row, 3 * FORWARD_F32)


@pytest.mark.slow
@with_source
def test_empty_source_has_zero_attention_weights(config):
    params, valid = parameters(config), np.array(SOURCE_VALID)
    valid[1] = False
    state = begin(config, params, valid=valid)
    logits, state = run(config, params, draw_tokens(), state, np.ones((ROWS, TOKENS), bool))
    assert np.isfinite(logits).all()
    if config.attention is not None:
        assert not np.asarray(state.weights)[1].any()
        assert_near(np.asarray(state.weights).sum(axis=1), [1, 0, 1], FORWARD_F32)


@pytest.mark.slow
@every_config
def test_state_rows_can_be_gathered(config):
    """Beams and forks gather rows; the first axis of every leaf is B."""
    params, prompt = parameters(config), draw_tokens()
    valid = np.ones(prompt.shape, bool)
    _, state = run(config, params, prompt, begin(config, params), valid)
    assert all(leaf.shape[0] == ROWS for leaf in jax.tree.leaves(state))
    order = np.array([2, 2, 0])
    gathered = jax.tree.map(lambda leaf: leaf[order], state)
    want, _ = run(config, params, prompt[:, :1], state, valid[:, :1])
    out, _ = run(config, params, prompt[order, :1], gathered, valid[:, :1])
    assert_near(out, want[order], FORWARD_F32)
    assert np.abs(np.asarray(want)[2] - np.asarray(want)[0]).max() > 0.1


@pytest.mark.slow
def test_vmap_over_parameters_matches_separate_models():
    many = [parameters(DOT, seed) for seed in (1, 2)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *many)
    model, tokens = build(DOT), draw_tokens()

    def logits(params):
        source = dict(source=draw_source(), source_valid=SOURCE_VALID)
        return model.apply({"params": params}, tokens, **source)[0]

    got = jax.jit(jax.vmap(logits))(stacked)
    for one, params in zip(got, many, strict=True):
        assert_near(one[0], oracle_row(DOT, params, tokens[0], 0)[0], 3 * FORWARD_F32)


# Packed documents

DOCUMENTS = np.array(
    [[3, 3, 3, 3, 7, 7, 3, 3, 3, 3, 3], [1] * 11, [0, 5, 5, 5, 5, 0, 0, 2, 2, 2, 0]], np.int32
)
"""Document ids of each row; two separate runs of an id are two documents."""
PADDED = np.ones((ROWS, TOKENS), bool)
PADDED[0, [2, 4]] = PADDED[2, [0, 2, 5, 6, 10]] = False


def columns_of_documents(row: int) -> list[list[int]]:
    """Return the columns of each document of a row, without padding."""
    ids = DOCUMENTS[row]
    edges = [0, *(np.flatnonzero(np.diff(ids)) + 1), TOKENS]
    runs = [range(*edge) for edge in itertools.pairwise(edges)]
    return [kept for run in runs if (kept := [t for t in run if PADDED[row, t]])]


@pytest.mark.long_except("rnn")
@pytest.mark.parametrize("config", [LSTM, RNN], ids=["lstm", "rnn"])
def test_packed_documents_match_separate_documents(config):
    """The state is that of the last document."""
    params, tokens, model = parameters(config), draw_tokens(), build(config)
    read = jax.jit(partial(model.apply, {"params": params}))
    logits, state = jax.tree.map(np.asarray, read(tokens, segments=DOCUMENTS, valid=PADDED))
    assert [len(columns_of_documents(row)) for row in range(ROWS)] == [3, 1, 2]
    for row in range(ROWS):
        for columns in columns_of_documents(row):
            want, _, carries = oracle_read(config, params, tokens[row, columns])
            assert_near(logits[row, columns], want, 3 * FORWARD_F32)
        assert state.length[row] == len(columns)
        for leaf, expected in zip(*map(jax.tree.leaves, (state.carry, carries)), strict=True):
            assert_near(leaf[row], expected, 3 * FORWARD_F32)


# A tagger

TAGGER = dataclasses.replace(LSTM, bidirectional=True)
RNN_TAGGER = dataclasses.replace(TAGGER, cell="rnn")
TIED = dataclasses.replace(RNN_TAGGER, tie_embeddings=True)


def oracle_tags(config, params, tokens) -> np.ndarray:
    """Return the logits [T, V] of one document from the bidirectional formulas."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    embed, read_out = params["embed"], params["read_out"]
    x = [embed["tokens"][token] for token in tokens]
    for i in range(config.num_layers):
        x = oracle_layer(config, params["layers"], i, x)[0]
    top = np.tanh(np.array(x) @ read_out["kernel"] + read_out["bias"])
    return top @ embed["tokens" if config.tie_embeddings else "output"].T + embed["bias"]


@pytest.mark.long_except("tied rnn")
@pytest.mark.parametrize("config", [TAGGER, TIED], ids=["lstm", "tied rnn"])
def test_tagger_processes_each_document_in_both_directions(config):
    """Padding before, between and after the tokens; packed, and with one document per row."""
    params, tokens = parameters(config), draw_tokens()
    read = jax.jit(partial(build(config).apply, {"params": params}))
    logits, state = read(tokens, segments=DOCUMENTS, valid=PADDED)
    assert state is None and logits.shape == (ROWS, TOKENS, VOCAB)
    for row in range(ROWS):
        for columns in columns_of_documents(row):
            want = oracle_tags(config, params, tokens[row, columns])
            assert_near(np.asarray(logits)[row, columns], want, 3 * FORWARD_F32)
    at = np.random.default_rng(23).permuted(np.tile(np.arange(TOKENS), (ROWS, 1)), axis=1)
    picked = np.asarray(read(tokens, valid=PADDED, at=at.astype(np.int32))[0])
    for row in range(ROWS):
        whole = np.empty_like(picked[row])
        whole[at[row]] = picked[row]
        want = oracle_tags(config, params, tokens[row, PADDED[row]])
        assert_near(whole[PADDED[row]], want, 3 * FORWARD_F32)


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["rnn", "lstm", "gru"])
def test_classifier_uses_final_states_from_both_directions(cell):
    """Padding before, between and after the tokens of a row."""
    config = dataclasses.replace(TAGGER, cell=cell, num_classes=3)
    params, tokens = parameters(config), draw_tokens()
    logits = build(config).apply({"params": params}, tokens, valid=PADDED, method="classify")
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    for row in range(ROWS):
        x = [wide["embed"]["tokens"][token] for token in tokens[row, PADDED[row]]]
        for i in range(config.num_layers):
            x, forward, backward = oracle_layer(config, wide["layers"], i, x)
        ends = np.concatenate([forward[-1], backward[-1]])
        want = ends @ wide["classifier"]["kernel"] + wide["classifier"]["bias"]
        assert_near(logits[row], want, 3 * FORWARD_F32)


def test_edit_across_packed_documents_of_tagger_is_rejected():
    edit = {"read_out": lambda x: x - x.mean(axis=1, keepdims=True)}
    apply = partial(build(TAGGER).edited(edit).apply, {"params": parameters(TAGGER)})
    assert jax.eval_shape(apply, draw_tokens())[0].shape == (ROWS, TOKENS, VOCAB)
    with pytest.raises(ValueError, match="edit of read_out needs the tokens of one sequence"):
        jax.eval_shape(partial(apply, segments=DOCUMENTS), draw_tokens())


def test_tagger_without_classes_has_no_head():
    params = parameters(RNN_TAGGER)
    assert "classifier" not in params
    with pytest.raises(ValueError, match=r"^num_classes is None: this model"):
        build(RNN_TAGGER).apply({"params": params}, draw_tokens(), method="classify")


@pytest.mark.slow
@pytest.mark.parametrize("config", [LSTM, RNN_TAGGER], ids=["lstm", "rnn tagger"])
def test_target_padding_has_no_gradient(config):
    params, tokens = parameters(config), draw_tokens()
    tokens = np.where(PADDED, np.where(tokens == 1, 2, tokens), 1)
    params["embed"]["tokens"][1] = np.nan

    def loss(params):
        logits, _ = build(config).apply({"params": params}, tokens, valid=PADDED)
        return jnp.where(PADDED[:, :, None], logits, 0.0).sum()

    slopes = jax.jit(jax.grad(loss))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))
    assert not np.asarray(slopes["embed"]["tokens"])[1].any()
    assert np.asarray(slopes["embed"]["tokens"])[2].any()


def test_tagger_has_no_decoding_step_or_state():
    with pytest.raises(ValueError, match="model is a RecurrentTagger: it is bidirectional"):
        make_step(build(TAGGER))
    with pytest.raises(ValueError, match="bidirectional is True: a bidirectional model has no"):
        init_recurrent_state(TAGGER, ROWS)


# Dropout


@pytest.mark.slow
def test_dropout_requires_key():
    config = dataclasses.replace(LSTM, dropout=0.3)
    params, tokens = parameters(config), draw_tokens()
    apply = jax.jit(build(config).apply)
    one, again, other = (
        np.asarray(apply({"params": params}, tokens, key=jax.random.key(n))[0]) for n in (1, 1, 2)
    )
    without = apply({"params": params}, tokens)[0]
    assert_same_bits(one, again)
    assert (np.abs(one - other).max(axis=-1) > 0.01).all()
    want, _ = oracle_row(config, params, tokens[0], 0)
    assert_near(without[0], want, 3 * FORWARD_F32)


def test_dropout_applies_between_layers_but_not_time_steps(monkeypatch):
    """Dropout is also applied to embeddings and before the output, with separate keys."""
    config = dataclasses.replace(GENERAL, dropout=0.3)
    params, seen = parameters(config), []
    for module in (recurrent, vocabulary):
        monkeypatch.setattr(
            module, "dropout", lambda x, rate, key: seen.append((x.shape, rate, key is None)) or x
        )
    jax.eval_shape(
        partial(build(config).apply, source=draw_source(), key=jax.random.key(1)),
        {"params": params}, draw_tokens(),
    )  # fmt: skip
    wanted = {
        (ROWS, SOURCE, 5), (ROWS, SOURCE, 34),  # the encoder, with two directions
        (ROWS, TOKENS, 5), (ROWS, 17), (ROWS, TOKENS, 17),  # the decoder
    }  # fmt: skip
    assert {shape for shape, _, _ in seen} == wanted
    assert all(rate == 0.3 and not off for _, rate, off in seen)


# Learning


LETTERS, LONGEST = 7, 5
REVERSE = RecurrentConfig(
    vocab_size=LETTERS + 1, source_vocab_size=LETTERS + 1, d_embed=11, d_hidden=29, cell="gru",
    attention="dot",
)  # fmt: skip


@pytest.fixture(scope="module")
def fresh():
    return init_params(REVERSE, jax.random.key(1))


@pytest.mark.long
def test_encoder_decoder_learns_to_reverse(fresh):
    """Reverse words of 3 to 5 letters: greedy decoding gets > 99 % of unseen words right."""
    model, optimizer = build(REVERSE), optax.adam(2e-2)

    def words(key, rows):
        word_key, length_key = jax.random.split(key)
        word = jax.random.randint(word_key, (rows, LONGEST), 1, LETTERS + 1)
        length = jax.random.randint(length_key, (rows, 1), 3, LONGEST + 1)
        index = jnp.arange(LONGEST)[None]
        valid = index < length
        back = jnp.take_along_axis(word, jnp.where(valid, length - 1 - index, 0), axis=1)
        return word, valid, jnp.where(valid, back, 0)  # token 0 is start and end

    def loss(params, key):
        word, valid, back = words(key, 32)
        target, labels = jnp.pad(back, ((0, 0), (1, 0))), jnp.pad(back, ((0, 0), (0, 1)))
        logits, _ = model.apply({"params": params}, target, source=word, source_valid=valid)
        return cross_entropy(logits, labels)[0]

    def update(carry, key):
        params, state = carry
        value, slopes = jax.value_and_grad(loss)(params, key)
        updates, state = optimizer.update(slopes, state)
        return (optax.apply_updates(params, updates), state), value

    @jax.jit
    def train(params):
        keys = jax.random.split(jax.random.key(3), 200)
        return jax.lax.scan(update, (params, optimizer.init(params)), keys)

    (params, _), losses = train(fresh)
    assert losses[0] > 1.9 and losses[-1] < 0.05
    word, valid, back = words(jax.random.key(5), 211)
    state = read_source(REVERSE, params, word, valid)
    begin = np.zeros((211, 1), np.int32)
    tokens = generate(RecurrentStep(model), params, begin, state, num_tokens=LONGEST).tokens
    right = (np.where(valid, tokens, 0) == np.asarray(back)).all(axis=1)
    assert right.mean() > 0.99


# Configs, parameters, errors


@pytest.mark.slow
def test_parameter_count_matches_formula():
    cell = 3 * 17  # a GRU: three gates, plus one more bias
    decoder = (5 + 34 + 17 + 1) * cell + 17 + (17 + 17 + 1) * cell + 17
    encoder = 2 * ((5 + 17 + 1) * cell + 17 + (34 + 17 + 1) * cell + 17)
    bridges = 2 * (34 * 17 + 17)
    attention = 17 * 13 + 34 * 13 + 13 + (34 + 17) * 17
    tables = 23 * 5 + 31 * 5 + 31 * 17 + 31
    deep = dataclasses.replace(ADDITIVE, num_layers=2)
    assert num_params(deep) == encoder + bridges + decoder + attention + tables
    simple = 5 * 17 + 17 * 17 + 17
    assert num_params(RNN) == 31 * 5 + 31 * 17 + 31 + simple + 12 * 17 + simple
    pair, above = 2 * simple, 2 * (simple + (34 - 5) * 17)
    assert num_params(TIED) == 31 * 5 + 31 + pair + above + 34 * 5 + 5
    assert num_params(GRU) == 31 * 17 + 31 + (17 + 17 + 1) * cell + 17


@pytest.mark.slow
def test_initial_parameters_depend_only_on_key(fresh):
    other = init_params(REVERSE, jax.random.key(2))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(fresh))
    for table in (fresh["embed"]["tokens"], fresh["embed"]["output"], fresh["encoder"]["tokens"]):
        assert 0.07 < np.std(table) < 0.13
    assert (fresh["embed"]["tokens"] != other["embed"]["tokens"]).all()


def test_steps_with_equal_settings_are_equal_and_hash_equally():
    one, two = (RecurrentStep(build(dataclasses.replace(DOT))) for _ in range(2))
    assert one == two and hash(one) == hash(two)


SOURCED = dict(source_vocab_size=5)


@pytest.mark.parametrize(
    ("start", "change", "message"),
    [
        ({}, dict(vocab_size=0), "vocab_size is 0: must be positive"),
        ({}, dict(d_hidden=-1), "d_hidden is -1: must be positive"),
        ({}, dict(num_layers=2.0), "num_layers is 2.0: must be of type int"),
        ({}, dict(source_vocab_size=0), "source_vocab_size is 0: must be positive"),
        ({}, dict(cell="elman"), "cell is 'elman': must be one of 'rnn', 'lstm', 'gru'"),
        ({}, dict(dropout=1.0), "dropout is 1.0: must be at least 0 and below 1"),
        ({}, dict(init_std=0.0), "init_std is 0.0: must be positive"),
        ({}, dict(attention="dot"), "attention is 'dot': needs a source_vocab_size"),
        ({}, dict(num_classes=2), "num_classes is 2: needs bidirectional, and no source_vocab"),
        (dict(bidirectional=True), dict(num_classes=0), "num_classes is 0: must be positive"),
        (SOURCED, dict(context="input"), "context is 'input': needs an attention"),
        (SOURCED, dict(attention="luong"), "attention is 'luong': must be"),
        (SOURCED | dict(attention="dot"), dict(d_attention=3),
         "d_attention is 3: needs attention 'additive'"),
        (SOURCED | dict(attention="additive"), dict(d_attention=0),
         "d_attention is 0: must be positive"),
        (SOURCED | dict(bidirectional=True), dict(attention="dot"),
         "attention is 'dot': two directions are twice as wide"),
        (dict(d_embed=5), dict(tie_embeddings=True),
         "tie_embeddings is True: needs d_embed 5 to equal d_hidden 128"),
    ],
)  # fmt: skip
def test_invalid_config_is_rejected(start, change, message):
    valid = RecurrentConfig(**start)
    with pytest.raises(ConfigError, match=f"^{message}"):
        dataclasses.replace(valid, **change)


@pytest.mark.slow
def test_invalid_arguments_are_rejected_before_computation():
    """`generate` is called without parameters, which shows that it checks before compiling."""
    step, state = RecurrentStep(build(LSTM)), init_recurrent_state(LSTM, ROWS)
    wrong = draw_tokens()
    wrong[1, 2] = VOCAB
    deeper = init_recurrent_state(dataclasses.replace(LSTM, num_layers=3), ROWS)
    for prompt, start, message in (
        (wrong, state, r"token 31 at \[1, 2\]: must be from 0 to 30"),
        (draw_tokens(rows=2), state, "prompt has 2 rows, but the state has 3"),
        (draw_tokens(), deeper, "state.carry has shapes .* this model's are"),
        (draw_tokens(), init_recurrent_state(GRU, ROWS), "state.carry has shapes"),
        (draw_tokens(), None, "state is of type NoneType: must be a RecurrentState"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(step, {}, prompt, start, num_tokens=3)
    with pytest.raises(ValueError, match="key is None: must be set, because Sample"):
        generate(step, {}, draw_tokens(), state, num_tokens=3, sampler=Sample())
    apply, tokens = partial(step.model.apply, {"params": parameters(LSTM)}), draw_tokens()
    for message, arguments in (
        ("tokens have 3 rows, but the state has 2", dict(state=init_recurrent_state(LSTM, 2))),
        (r"valid is bool\[3, 10\]: must be bool\[3, 11\]", dict(valid=np.ones((3, 10), bool))),
        (r"valid is int32\[3, 11\]", dict(valid=np.ones((3, 11), np.int32))),
        ("key is 0: must be a single key", dict(key=0)),
        ("segments with a state", dict(state=state, segments=DOCUMENTS)),
        (r"segments are int32\[3, 10\]: must be", dict(segments=DOCUMENTS[:, 1:])),
        (r"segments are bool\[3, 11\]: must be", dict(segments=PADDED)),
        ("segments are list: must be integers", dict(segments=DOCUMENTS.tolist())),
    ):
        with pytest.raises(ValueError, match=message):
            apply(tokens, **arguments)


@pytest.mark.parametrize("config", [LSTM, DOT], ids=["lstm", "dot"])
def test_rngs_argument_error_suggests_alternative(config):
    model, tokens = build(config), draw_tokens()
    arguments = {} if config.source_vocab_size is None else {"source": draw_source()}
    with pytest.raises(ValueError, match="rngs contains 'dropout': pass the dropout key"):
        model.apply({"params": {}}, tokens, **arguments, rngs={"dropout": jax.random.key(0)})


@pytest.mark.slow
def test_inconsistent_source_and_state_are_rejected():
    model, params = build(ADDITIVE), parameters(ADDITIVE)
    apply, tokens, source = partial(model.apply, {"params": params}), draw_tokens(), draw_source()
    state = begin(ADDITIVE, params)
    other = dataclasses.replace(GENERAL, cell="gru", num_layers=1)
    general = begin(other, parameters(other))
    for message, arguments in (
        ("pass either source or state", {}),
        ("pass either source or state", dict(source=source, state=state)),
        ("source_valid needs a source", dict(state=state, source_valid=SOURCE_VALID)),
        (
            r"valid is .*: must be bool\[3, 7\], the shape of source",
            dict(source=source, source_valid=source),
        ),
        (r"token 23 at \[0, 0\]: must be from 0 to 22", dict(source=source * 0 + SOURCE_VOCAB)),
        ("state.memory is None", dict(state=dataclasses.replace(state, memory=None))),
        ("state.memory.keys have width None, but the attention needs 13", dict(state=general)),
    ):
        with pytest.raises(ValueError, match=message):
            apply(tokens, **arguments)
    narrow = dataclasses.replace(state.memory, states=state.memory.states[:, :, :17])
    with pytest.raises(
        ValueError, match=r"state\.memory has width 17, but the model's memory has width 34"
    ):
        apply(tokens, state=dataclasses.replace(state, memory=narrow))
    with pytest.raises(ValueError, match=r"state\.memory must be None: this model has no"):
        plain = dataclasses.replace(PLAIN, num_layers=1)
        build(plain).apply({"params": parameters(plain)}, tokens, state=state)
    with pytest.raises(ValueError, match="source_vocab_size is 23: its state starts from a source"):
        init_recurrent_state(ADDITIVE, ROWS)
    with pytest.raises(ValueError, match="batch is -1"):
        init_recurrent_state(LSTM, -1)


@pytest.mark.slow
def test_traced_unknown_token_makes_only_its_row_nan():
    tokens = draw_tokens()
    tokens[1, 2] = VOCAB
    valid = np.ones(tokens.shape, bool)
    logits, _ = run(LSTM, parameters(LSTM), tokens, init_recurrent_state(LSTM, ROWS), valid)
    assert np.isfinite(logits[1, :2]).all() and np.isnan(logits[1, 2:]).all()
    assert np.isfinite(logits[jnp.array([0, 2])]).all()
