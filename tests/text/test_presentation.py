"""Results of the text tools for known numbers, with fakes instead of the compiled programs.

`test_interpret.py`, `test_evaluating.py` and `test_lm_eval.py` test the programs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.server.models import tiny
from tests.text.models import CONFIG, LETTERS
from transformer_jax import RecurrentConfig, build, init_params, interpret
from transformer_jax.config import TrainConfig
from transformer_jax.config.tasks import LanguageTask, PrefixTask, Seq2SeqTask, TonesTask
from transformer_jax.decoding import completion
from transformer_jax.decoding.completion import TextGenerator
from transformer_jax.decoding.continuous_batching import Batcher, Request
from transformer_jax.decoding.logit_processors import Ban, Force, ForceLast
from transformer_jax.decoding.samplers import Sample, Temperature
from transformer_jax.loading import TextModel
from transformer_jax.text import inspect as inspecting
from transformer_jax.text import inspect_programs as programs
from transformer_jax.text import lm_eval as adapter
from transformer_jax.text import scores
from transformer_jax.text.evaluation import task_on
from transformer_jax.text.language_model import LanguageModel
from transformer_jax.text.reading import read_whole
from transformer_jax.training.tasks import answers
from transformer_jax.training.tasks.answers import Targets

pytestmark = pytest.mark.usefixtures("quick_compilation")


def letters(config=CONFIG, **fields: Any) -> LanguageModel:
    """A model of the letters a to k without parameters, which the fakes do not need."""
    return LanguageModel(TextModel(config, {}, LETTERS, **fields), "here")


def likeliest(ids: str) -> Any:
    """Return a fake for `logits` that maps the letter before the answer to the likeliest one."""

    def logits(config, params, tokens, inputs, at):
        following = dict(zip(LETTERS.encode(ids[0::2]), LETTERS.encode(ids[1::2]), strict=True))
        return -np.abs(np.arange(11) - following[int(tokens[0, at])])

    return logits


def test_logit_lens_shows_most_likely_tokens_at_each_position(monkeypatch):
    ids = np.arange(3 * 2 * 2).reshape(3, 2, 2) % 11
    p = np.arange(12, 0, -1).reshape(3, 2, 2) / 100

    def lens(config, params, tokens, inputs, count, kinds):
        assert (tokens.tolist(), count, kinds) == ([[1, 0]], 2, 11)
        return p, ids

    monkeypatch.setattr(programs, "lens", lens)
    found = letters().inspect.lens("ba", count=2)
    assert found.top == [
        [["a", "b"], ["c", "d"]], [["e", "f"], ["g", "h"]], [["i", "j"], ["k", "a"]],
    ]  # fmt: skip
    [table] = found.tables()
    assert table.title == "logit lens: the likeliest next token if the model ended there"
    assert (table.rows, table.columns) == (["embedding", "block 0", "block 1"], ["b", "a"])
    assert table.cells == [["a", "c"], ["e", "g"], ["i", "k"]]
    assert table.hints[1] == ["'e' 0.080, 'f' 0.070", "'g' 0.060, 'h' 0.050"]
    assert (table.values == p[..., 0]).all()
    assert found.summary() == "after the last token: 'k' 0.020, 'a' 0.010"


def test_patching_effects_are_relative_to_prompt_difference(monkeypatch):
    by_token = np.arange(3 * 2 * 3).reshape(3, 2, 3) / 10
    by_head = np.array([[1.5, 9], [-3, 1]])

    def patched(config, params, clean, corrupted, inputs, ids, at):
        assert (clean.tolist(), corrupted.tolist()) == ([[1, 0, 3]], [[2, 0, 4]])
        assert (ids.tolist(), at) == ([5, 6], 2)
        return 3.0, 1.0, by_token, [by_head]

    monkeypatch.setattr(programs, "patched", patched)
    monkeypatch.setattr(programs, "logits", likeliest("dfeg"))
    found = letters().inspect.patch("bad", "cae")
    assert (found.answer, found.other_answer) == ("f", "g")
    names = ["residual", "attention/output", "feed_forward/output"]
    assert list(found.by_token) == names
    for name, x in zip(names, by_token, strict=True):
        np.testing.assert_allclose(found.by_token[name], (x - 1) / 2)
    np.testing.assert_allclose(found.by_head["attention/heads"], (by_head - 1) / 2)
    assert found.summary() == (
        "logit of 'f' - 'g': 3.000 for the text, 1.000 for the other prompt\n"
        "attention/heads: block 0 head 1 +4.000, block 1 head 0 -2.000, block 0 head 0 +0.250, "
        "block 1 head 1 +0.000"
    )
    tables = found.tables()
    assert [table.title for table in tables] == [
        *(f"{name}, one token put in: share of the answer" for name in names),
        "attention/heads, one head put in: share of the answer",
    ]
    assert tables[0].columns == ["b / c", "a", "d / e"] and tables[0].rows == ["block 0", "block 1"]
    assert tables[3].columns == ["head 0", "head 1"]
    for other, message in (
        ("cafe", "other has 4 tokens: must be as many as in the text, 3"),
        ("bcd", "the answer to both prompts is 'f': pass an answer and an other_answer"),
    ):
        with pytest.raises(ValueError, match=message):
            letters().inspect.patch("bad", other)
    monkeypatch.setattr(programs, "patched", lambda *args: (1.0, 0.95, by_token, [by_head]))
    with pytest.warns(UserWarning, match=r"differs by 0.05 between the prompts, less than 0.81:"):
        letters().inspect.patch("bad", "cae")
    monkeypatch.setattr(programs, "patched", lambda *args: (1.0, 1.0, by_token, [by_head]))
    with pytest.raises(ValueError, match=r"logit of 'f' - 'g' is 1.0+ for both prompts: must"):
        letters().inspect.patch("bad", "cae")


def test_head_ablation_shows_change_in_answer(monkeypatch):
    change = np.array([[0.5, -2], [0, 1]])

    def without(config, params, tokens, inputs, ids, at):
        assert (tokens.tolist(), ids.tolist(), at) == ([[1, 0, 3]], [2, 4], 2)
        return 2.5, [change]

    def weights(config, params, tokens, inputs):
        rows, T = tokens.shape
        assert (rows, T) in ((1, 3), (inspecting.ROWS, 16)) and tokens.max() < 11
        assert T == 3 or (tokens[:, :8] == tokens[:, 8:]).all()
        uniform = np.tri(T) / np.arange(1, T + 1)[:, None]
        return np.broadcast_to(uniform, (rows, 2, 2, T, T))

    monkeypatch.setattr(programs, "without", without)
    monkeypatch.setattr(programs, "weights", weights)
    repeated = np.tile(np.arange(8), (inspecting.ROWS, 2))
    monkeypatch.setattr(
        inspecting.interpret, "repeated_tokens",
        lambda key, kinds, rows, period: repeated if (kinds, rows, period) == (11, 4, 8) else None,
    )  # fmt: skip

    def head_scores(weights, period):
        return interpret.HeadScores(*(np.full((2, 2), x) for x in (0.1, 0.2, period)))

    monkeypatch.setattr(inspecting.interpret, "head_scores", head_scores)
    found = letters().inspect.heads("bad", answer="c", other_answer="e")
    np.testing.assert_allclose(found.entropy, (math.log(2) + math.log(3)) / 3, rtol=1e-6)
    assert found.summary() == (
        "logit of 'c' - 'e': 2.500\nchange without: block 0 head 1 -2.000, block 1 head 1 +1.000, "
        "block 0 head 0 +0.500, block 1 head 0 +0.000"
    )
    assert [(table.title, table.values[0, 0]) for table in found.tables()] == [
        ("change of logit of 'c' - 'e' without the head", 0.5),
        ("previous token score, on random tokens repeated once", 0.1),
        ("duplicate token score, on random tokens repeated once", 0.2),
        ("induction score, on random tokens repeated once", 8),
        ("entropy of attention over this text, nats", pytest.approx(math.log(6) / 3)),
    ]
    two = replace(found, cross_without=-change, other_answer=None)
    assert two.tables()[1].title == "change of logit of 'c' without the head of cross-attention"
    assert (
        two.summary()
        .splitlines()[2]
        .startswith("change without, in cross-attention: block 0 head 1 +2")
    )


def test_attribution_shows_largest_contributions(monkeypatch):
    shares, heads = np.array([0.25, -4, 1]), np.array([[1, -3], [2, 0.5]])

    def attributed(config, params, tokens, inputs, ids, baseline, at):
        assert (tokens.tolist(), ids.tolist(), int(baseline), at) == ([[1, 0, 3]], [5], 10, 2)
        parts = np.array([7.5]), heads[None], np.array([[10, 20]]), np.array([-0.25])
        return (2.0, 1.5, shares), interpret.LogitAttribution(*parts)

    monkeypatch.setattr(programs, "attributed", attributed)
    monkeypatch.setattr(programs, "logits", likeliest("df"))
    found = letters().inspect.attribution("bad", baseline="k")
    assert (found.answer, found.other_answer, found.tokens) == ("f", None, ["b", "a", "d"])
    assert (found.embedding, found.bias, found.reason) == (7.5, -0.25, None)
    assert found.summary() == (
        "logit of 'f': 2.000, 1.500 for 'k' only\ntokens: 'a' -4.000, 'd' +1.000, 'b' +0.250\n"
        "heads: block 0 head 1 -3.000, block 1 head 0 +2.000, block 0 head 0 +1.000, "
        "block 1 head 1 +0.500"
    )
    tokens, parts = found.tables()
    assert tokens.title == "logit of 'f': contribution of each token, compared with 'k'"
    assert tokens.columns == ["b", "a", "d"] and tokens.values.tolist() == [[0.25, -4, 1]]
    rest = "embedding 7.50, biases -0.25"
    assert parts.title == f"direct contribution of each part; the rest is {rest}"
    assert parts.columns == ["head 0", "head 1", "feed-forward"]
    assert parts.values.tolist() == [[1, -3, 10], [2, 0.5, 20]]
    over_source = replace(found, cross_heads=-heads, reason="a softcap").tables()[1]
    assert over_source.columns[3:] == ["source head 0", "source head 1"]
    assert over_source.values[:, 3:].tolist() == [[-1, 3], [-2, -0.5]]
    assert len(replace(found, heads=None).tables()) == 1
    with pytest.raises(ValueError, match="answer and other_answer are 'f': must differ"):
        letters().inspect.attribution("bad", other_answer="f", baseline="k")


@pytest.mark.slow
def test_programs_return_expected_shapes():
    """Traced for 3 places, 1 block, 5 tokens and 2 heads."""
    config = replace(CONFIG, d_model=4, num_layers=1)

    def shapes(name: str, *args: Any, **fixed: Any) -> Any:
        function = getattr(programs, name).function
        found = jax.eval_shape(
            lambda params, *arrays: function(build(config), params, *arrays, **fixed), *args
        )
        return jax.tree.map(lambda leaf: leaf.shape, found)

    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    tokens, ids = np.zeros((1, 5), np.int32), np.zeros(2, np.int32)
    assert shapes("patched", params, tokens, tokens, {}, ids, at=3) == ((), (), (3, 1, 5), [(1, 2)])
    assert shapes("without", params, tokens, {}, ids, at=3) == ((), [(1, 2)])
    assert shapes("lens", params, tokens, {}, count=3, size=7) == ((2, 5, 3), (2, 5, 3))
    assert shapes("logits", params, tokens, {}, at=3) == (11,)
    assert shapes("weights", params, tokens, {}) == (1, 1, 2, 5, 5)
    encoder = replace(CONFIG, kind="encoder-decoder", num_layers=3, num_decoder_layers=5)
    names = ["residual", "attention/output", "cross_attention/output"]
    assert programs.streams(encoder) == [*names, "feed_forward/output"]
    assert programs.streams(replace(encoder, d_ff=0)) == names
    assert programs.depth(encoder) == 5
    assert programs.depth(replace(encoder, kind="encoder", num_decoder_layers=None)) == 3
    z = programs._metric(ids + np.array([4, 7]), 2)(np.arange(44.0).reshape(1, 4, 11) ** 2)
    assert float(z) == 26**2 - 29**2
    assert float(programs._metric(ids[:1] + 4, 2)(np.arange(44.0).reshape(1, 4, 11))) == 26
    assert programs._batch_size(replace(config, vocab_size=2**20), np.zeros((1, 16))) == 4
    assert programs._batch_size(replace(config, vocab_size=2**26), np.zeros((1, 16))) == 1


@pytest.mark.parametrize(("task", "options", "changed"), [
    (Seq2SeqTask(beams=3), dict(beams=1), dict(judged=2**31 - 1, beams=1)),
    (Seq2SeqTask(beams=3), dict(examples=1), dict(judged=1, beams=3)),
    (PrefixTask(), dict(targets="t", examples=7, beams=2),
     dict(judged=7, beams=2, targets="t", val_targets="t")),
    (LanguageTask(), {}, {}),
    (TonesTask(), dict(examples=1), dict(judged=1)),
    (TonesTask(), {}, dict(judged=2**31 - 1)),
])  # fmt: skip
def test_run_is_evaluated_on_entire_other_file(task, options, changed):
    two = isinstance(task, Seq2SeqTask | TonesTask)
    model = task.fit_model(replace(CONFIG, kind="encoder-decoder" if two else "decoder"))
    old = {} if isinstance(task, TonesTask) else {"data": "old"}
    run = TrainConfig(model=model, task=task, eval_batches=5, **old)
    options = dict(targets=None, examples=None, beams=None, context=None) | options
    found = task_on(letters(run.model, run=run), "new", **options)
    expected = replace(run, task=replace(task, **changed), eval_batches=None)
    if not isinstance(task, TonesTask):
        expected = replace(expected, data="new", val_data="new", data_weights=None)
    assert found == expected


@pytest.mark.parametrize(("options", "message"), [
    (dict(examples=0), "examples is 0: must be at least 1"),
    (dict(context=0), "context is 0: must be at least 1"),
    (dict(context=5), "context is 5: must be None for a run, which has its own"),
    (dict(beams=2), "beams is 2: a run for task 'language' has no pairs"),
    (dict(examples=2), "examples is 2: a run for task 'language' has no pairs"),
])  # fmt: skip
def test_evaluation_option_incompatible_with_run_is_rejected(options, message):
    run = TrainConfig(model=CONFIG, task=LanguageTask())
    options = dict(targets=None, examples=None, beams=None, context=None) | options
    with pytest.raises(ValueError, match=message):
        task_on(letters(run=run), "new", **options)


class RecordingHook:
    """lm-eval's cache hook, which records what it receives."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def add_partial(self, *args: Any) -> None:
        self.kept.append(args)


@pytest.fixture
def adapter_of(monkeypatch):
    """Return a function that builds the adapter without lm-eval."""

    class Bar:
        def __init__(self, total: int, desc: str, disable: bool = False) -> None:
            self.left = total

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *args: object) -> None:
            assert self.left == 0 or args[0] is not None

        def update(self, count: int) -> None:
            self.left -= count

    bar = ModuleType("tqdm")
    bar.tqdm = Bar  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tqdm", bar)
    monkeypatch.setattr(adapter, "_Base", type("Base", (), {}))

    def make(model: LanguageModel, **options: Any) -> Any:
        found = adapter.TransformerJaxLM(model, **options)
        found.cache_hook = RecordingHook()
        return found

    return make


def test_lm_eval_adapter_encodes_and_decodes_texts(adapter_of):
    lm = adapter_of(letters(begin_id=10), batch_size="3")
    assert (lm.batch_size, lm.max_length, lm.max_gen_toks) == (3, 17, 256)
    assert (lm.eot_token_id, lm.prefix_token_id, lm.tokenizer_name) == (None, 10, "here")
    assert lm.tok_encode("bad") == [10, 1, 0, 3]
    assert lm.tok_encode("bad", add_special_tokens=False) == [1, 0, 3]
    assert lm.tok_encode("bad", left_truncate_len=2) == [0, 3]
    assert adapter_of(letters(begin_id=10), add_bos_token=False).tok_encode("bad") == [1, 0, 3]
    assert (lm.tok_decode([1, 0]), lm.tok_decode(3)) == ("ba", "d")
    assert adapter_of(letters(stop_ids=(9,))).eot_token_id == 9
    assert adapter_of(letters(), max_length=5).max_length == 5
    assert adapter_of(letters(replace(CONFIG, positions="rope", max_len=2**30))).max_length == 2048
    lm = adapter_of(tiny())
    assert (lm.eot_token_id, lm.prefix_token_id) == (257, 257)
    assert lm.tokenizer_name == "__home__somebody__secret"
    assert lm.tok_encode("<e>ab") == [257, 256] and lm.tok_decode([257, 256]) == "ab"
    assert lm.tok_decode([257, 256], skip_special_tokens=False) == "<e>ab"
    assert (
        lm.chat_template(True) == lm.chat_template("any") == tiny().tokenizer.chat_templates[0][1]
    )
    assert lm.chat_template() is None and lm.chat_template(None) is None
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y "}]
    whole = lm.apply_chat_template(talk[:1])
    assert whole == tiny().tokenizer.chat(talk[:1], add_generation_prompt=True)
    begun = lm.apply_chat_template(talk, add_generation_prompt=False)
    assert tiny().tokenizer.chat(talk, add_generation_prompt=False).startswith(begun)
    assert begun.rstrip().endswith("y") and talk[1]["content"] == "y "
    for wrong, message in (
        (dict(batch_size="auto"), "batch_size"), (dict(max_gen_toks=0), "max_gen_toks is 0"),
        (dict(max_length=1), "max_length is 1"), (dict(max_length=18), "max_length is 18"),
        (dict(dtype="float32"), "dtype is 'float32': the model is already loaded"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            adapter_of(letters(), **wrong)
    with pytest.raises(ValueError, match="apply_chat_template: 'here' has no chat template"):
        adapter_of(letters()).apply_chat_template(talk)
    with pytest.raises(ValueError, match="chat_template is True: 'here' has none"):
        adapter_of(letters()).chat_template(True)


def test_lm_eval_adapter_reports_score_for_each_request(adapter_of, monkeypatch):
    scored: list[Any] = []

    def score_requests(model, requests, rows, longest, report):
        assert (rows, longest) == (8, 5)
        scored.extend((one.context, one.continuation) for one in requests)
        report(len(requests))
        return [SimpleNamespace(log_prob=-len(one.continuation), is_likeliest=not one.context[0])
                for one in requests]  # fmt: skip

    monkeypatch.setattr(adapter, "score_requests", score_requests)
    lm = adapter_of(letters(begin_id=10), max_length=5)
    texts = ("a", "bc"), ("", "d")
    requests = [(texts[0], [0], [1, 2]), (texts[1], [], [3]), (None, [0, 1], [4])]
    assert lm._loglikelihood_tokens(requests) == [(-2, True), (-1, False), (-1, True)]
    assert scored == [((0,), (1, 2)), ((10,), (3,)), ((0, 1), (4,))]
    kept = [("loglikelihood", texts[0], (-2, True)), ("loglikelihood", texts[1], (-1, False))]
    assert lm.cache_hook.kept == kept
    with pytest.raises(ValueError, match="continuation is 'x': must add at least one token"):
        lm._loglikelihood_tokens([(("a", "x"), [0], [])])
    scored.clear()
    asks = [SimpleNamespace(args=("abcdefg",)), SimpleNamespace(args=("bad",))]
    assert lm.loglikelihood_rolling(asks) == [-7, -3]
    whole = [((10,), (0, 1, 2, 3, 4)), ((1, 2, 3, 4), (5, 6)), ((10,), (1, 0, 3))]
    assert scored == [(context, continuation) for context, continuation in whole]
    assert lm.cache_hook.kept[2:] == [("loglikelihood_rolling", asks[0].args, -7),
                                      ("loglikelihood_rolling", asks[1].args, -3)]  # fmt: skip


def test_lm_eval_adapter_generates_each_text_until_its_end(adapter_of, monkeypatch):
    """The fake model continues the alphabet from the last letter of each prompt."""
    calls = SimpleNamespace(admitted=[], released=[], rooms=[])

    class Spy(Batcher):
        def __post_init__(self) -> None:
            super().__post_init__()
            calls.rooms.append((len(self.rows), self.slots.capacity, self.slots.options.stop))
            calls.requests, self.requests = self.requests, self.spied()

        def spied(self) -> Iterator[Request | None]:
            for request in calls.requests:
                calls.admitted.append(list(request.prompt))
                yield request

        def drop(self, name: Any) -> None:
            calls.released += [name for row in self.rows if row is not None and row.id == name]
            super().drop(name)

    def alphabet(params: Any, tokens: jax.Array, state: jax.Array, *, valid: Any = None) -> Any:
        return jax.nn.one_hot((tokens + 1) % 11, 11), state

    monkeypatch.setattr(adapter, "Batcher", Spy)
    stepped = []
    module = SimpleNamespace(clone=lambda edits: stepped.append(edits))
    monkeypatch.setattr(adapter, "build", lambda config: module)
    monkeypatch.setattr(adapter, "make_step", lambda model: alphabet)
    monkeypatch.setattr(adapter, "init_decode_state", lambda *args: jnp.zeros((1,), jnp.int32))

    def texts(lm: Any, *asks: tuple[str, dict[str, Any]]) -> list[str]:
        return lm.generate_until([SimpleNamespace(args=one) for one in asks])

    lm = adapter_of(letters(stop_ids=(9,)), batch_size=2, max_gen_toks=4)
    assert texts(lm, ("abc", {}), ("g", {}), ("ba", {"until": ["d"]}), ("ef", {})) == [
        "defg", "hi", "bc", "ghi",
    ]  # fmt: skip
    assert calls.admitted == [[0, 1, 2], [4, 5], [6], [1, 0]]
    assert calls.rooms == [(2, 3 + 4, (9,)), (1, 2 + 4, (9,))] and calls.released == []
    assert [one[1][0] for one in lm.cache_hook.kept] == ["abc", "ef", "g", "ba"]
    assert texts(lm, ("a", {"until": ["c"], "max_gen_toks": 14})) == ["b"]
    assert calls.rooms[-1] == (1, 1 + 14, (9,)) and calls.released == []
    long = adapter_of(letters(), batch_size=2, max_gen_toks=14)
    assert texts(long, ("a", {"until": "d"}), ("abcdefg", {"until": "d"})) == ["bc", "hijkabc"]
    assert calls.admitted[-2:] == [[4, 5, 6], [0]] and sorted(calls.released) == [0, 1]
    with pytest.raises(ValueError, match="max_gen_toks is 17: must be below max_length, 17"):
        texts(lm, ("a", {"max_gen_toks": 17}))
    assert not any(stepped)
    edited = letters().edited({"logits": lambda logits: logits})
    texts(adapter_of(edited, max_gen_toks=2), ("a", {}))
    assert stepped[-1] == edited.module.edits != ()


ROTARY = replace(CONFIG, positions="rope", max_len=200)


def key_of(key: jax.Array) -> list[int]:
    return jax.random.key_data(key).tolist()


def test_generate_supports_single_streamed_sampled_and_list_prompts(monkeypatch):
    """Prompts of a list that fit are batched; the others are written one by one."""
    key, sampler = jax.random.key(7), Sample(Temperature(1.0))

    def complete(self, prompt, count):
        yield f"{len(prompt)}+{count} of {self.config.max_len}"
        yield f", {key_of(self.key)}"

    def samples(self, prompt, count, samples):
        return [f"{len(prompt)}+{count} of {self.config.max_len}"] * samples

    def answer(self, prompts, count, *, slots, numbers):
        size = f"+{count} of {self.config.max_len}, {slots} at once"
        yield from reversed(
            [(n, f"{len(ids)}{size}") for n, ids in zip(numbers, prompts, strict=True)]
        )

    for one in (complete, samples, answer):
        monkeypatch.setattr(TextGenerator, one.__name__, one)
    model, greedy = letters(ROTARY), key_of(jax.random.key(0))
    assert model.generate("bad") == f"3+400 of 200, {greedy}"
    assert model.generate("bad", 61) == f"3+61 of 64, {greedy}"
    assert model.generate("bad", 62) == f"3+62 of 128, {greedy}"
    assert list(model.generate("bad", 5, stream=True)) == ["3+5 of 64", f", {greedy}"]
    draws: dict[str, Any] = dict(sampler=sampler, key=key)
    assert model.generate("bad", 5, **draws).endswith(f", {key_of(key)}")
    assert model.generate("bad", 5, samples=2, **draws) == ["3+5 of 64"] * 2
    assert model.generate("bad", samples=1, **draws) == ["3+198 of 200"]  # as many as fit
    assert letters(ROTARY, begin_id=3).generate("bad", 5).startswith("4+5")
    long = "a" * 197
    second = key_of(jax.random.fold_in(key, 1))
    assert model.generate(["bad", long, "a"], 5, **draws) == [
        "3+5 of 64, 8 at once", f"197+5 of 200, {second}", "1+5 of 64, 8 at once",
    ]  # fmt: skip
    assert model.generate(["a"] * 3, 5, slots=2) == ["1+5 of 64, 2 at once"] * 3
    assert model.generate([long], 4) == ["197+4 of 200, 8 at once"]
    learned = letters(replace(CONFIG, positions="learned"))
    assert learned.generate("bad", 5) == f"3+5 of 17, {greedy}"


def test_published_model_generates_targets_from_sources(monkeypatch):
    calls = []

    def draw(targets, source, num_tokens, count, sampler, key):
        calls.append((key_of(key), targets.encode(source).tolist(), num_tokens, count))
        return ["", " one", "two"][:count] if count > 1 else [source]

    def answer(targets, sources, num_tokens):
        calls.append(num_tokens)
        return [f"likeliest of {source}" for source in sources]

    monkeypatch.setattr(Targets, "draw", draw)
    monkeypatch.setattr(Targets, "answer", answer)
    config = replace(ROTARY, kind="encoder-decoder", vocab_size=261)
    tokenizer = replace(tiny().tokenizer, target_ids=(("decoder_start_token_id", 258),))
    model = LanguageModel(TextModel(config, {}, tokenizer, (257,)), "here")
    letter = {name: tokenizer.encode(name).tolist()[0] for name in "xy"}
    key = jax.random.key(7)
    draws: dict[str, Any] = dict(sampler=Sample(Temperature(1.0)), key=key)
    assert model.generate("x", **draws) == "x"
    assert calls == [(key_of(key), [letter["x"]], 200, 1)]
    assert model.generate(["x", "y"], 5, **draws) == ["x", "y"]
    keys = [key_of(jax.random.fold_in(key, n)) for n in (0, 1)]
    assert calls[1:] == [(k, [letter[name]], 5, 1) for k, name in zip(keys, "xy", strict=True)]
    assert model.generate("x", 5, samples=2, **draws) == ["", " one"]
    assert list(model.generate("x", 5, stream=True)) == ["likeliest of x"] and calls[-1] == 5
    learned = LanguageModel(
        replace(model.model, config=replace(config, positions="learned")), "here"
    )
    assert learned.target_count(200) == learned.target_count(None) == 200
    with pytest.raises(ValueError, match="num_tokens is 201: must be at most max_len, 200"):
        learned.target_count(201)
    assert model.target_count(201) == 201
    monkeypatch.undo()
    with pytest.raises(ValueError, match="prompt is '': a source must have at least one token"):
        model.generate("")


def test_forced_target_tokens_are_applied_after_other_processors(monkeypatch):
    monkeypatch.setattr(answers, "_read_sources", lambda *args: "state")
    config = replace(ROTARY, kind="encoder-decoder", vocab_size=261)
    names = "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"
    ids = tuple(zip(names, (258, 5, 6), strict=True))
    tokenizer = replace(tiny().tokenizer, target_ids=ids)
    model = LanguageModel(TextModel(config, {}, tokenizer, (257,)), "here")
    targets = model.targets((Ban(3),))
    (_, _, prompt, state), named = targets._decoding_arguments([targets.encode("x")], 9)
    assert prompt.tolist() == [[258]] and state == "state"
    assert (named["num_tokens"], named["stop"]) == (9, (257,))
    assert named["processors"][-3:] == (Ban(3), Force(5), ForceLast(9, 6))


@pytest.fixture
def labels_as_nats(monkeypatch):
    """Give each label that counts as many nats as its id."""
    monkeypatch.setattr(
        scores, "token_nats", lambda model, params, batch: np.asarray(batch.labels) * 1.0
    )


def test_each_token_is_scored_once_for_any_windows(labels_as_nats):
    text = "badcabfeedaceface"  # 17 letters
    ids = LETTERS.encode(text).tolist()
    for options in (
        {},
        dict(window=5),
        dict(window=5, stride=2, batch_size=3),
        dict(window=16, stride=1),
    ):
        found = letters().score(text, **options)
        assert list(found.token_nats) == ids[1:] and list(found.tokens) == list(text[1:])
        assert (found.num_bytes, found.num_tokens, found.nats) == (16, 16, sum(ids[1:]))
    found = letters(begin_id=10).score(text)
    assert list(found.token_nats) == ids and found.num_bytes == 17
    assert found.perplexity == pytest.approx(math.exp(sum(ids) / 17))
    assert found.bits_per_byte == pytest.approx(sum(ids) / 17 / math.log(2))
    shown = f"Score(nats={sum(ids):.4f}, num_tokens=17, num_bytes=17, bits_per_byte="
    assert repr(found).startswith(shown)
    for options, message in (
        (dict(window=18), "window is 18: must be at most max_len, 17"),
        (dict(window=5, stride=6), "stride is 6: must be at most window, 5"),
        (dict(stride=18), "stride is 18: must be at most max_len, 17"),
    ):
        with pytest.raises(ValueError, match=message):
            letters().score(text, **options)
    for model, least in ((letters(), "two tokens"), (letters(begin_id=10), "one token")):
        with pytest.raises(ValueError, match=f"must have at least {least}"):
            model.score("b" if least == "two tokens" else "")


def test_answers_and_targets_are_scored_with_end_token(labels_as_nats):
    model, encode = tiny(), lambda text: tiny().tokenizer.encode(text).tolist()
    talk = [{"role": "user", "content": "bad"}, {"role": "assistant", "content": "fab"}]
    found = model.score(talk)
    assert list(found.token_nats) == [*encode("fab"), 257] and found.num_bytes == 3
    whole = "é ab"
    found = model.score(whole)
    assert list(found.token_nats) == encode(whole)[1:] and found.num_bytes == 5 - 1
    for wrong, message in (
        (talk[:1], "the last message has role 'user': must be a message from the assistant"),
        (("a", "b"), "must be a string"),
    ):
        with pytest.raises(ValueError, match=message):
            model.score(wrong)
    config = replace(ROTARY, kind="encoder-decoder", vocab_size=261)
    ends = (("decoder_start_token_id", 258),)
    tokenizer = replace(tiny().tokenizer, target_ids=ends)
    pair = LanguageModel(TextModel(config, {}, tokenizer, (257,)), "here")
    batch = read_whole(pair, ("bad", "fab"))
    assert batch.source.tolist()[:3] == encode("bad")
    assert batch.labels.tolist() == [*encode("fab"), 257]
    assert batch.ids.tolist() == [258, *encode("fab")]
    found = pair.score(("bad", "fab"))
    assert list(found.token_nats) == [*encode("fab"), 257] and found.num_bytes == 3
    for wrong, options, message in (
        (("bad", "fab"), dict(window=5), "window is 5: the target of a pair is scored as a whole"),
        (("", "fab"), {}, "the source has no tokens"),
        ("bad", {}, "must be .source, target.; the target is scored"),
    ):
        with pytest.raises(ValueError, match=message):
            pair.score(wrong, **options)
    short = replace(config, positions="learned", max_len=3)
    full = LanguageModel(replace(pair.model, config=short), "here")
    with pytest.raises(ValueError, match="source: it has 4 tokens, but a sequence has at most 3"):
        read_whole(full, ("abcde"[1:], "f"))
    assert read_whole(full, ("bcd", "f")).ids.tolist() == [258, *encode("f")]


def test_text_generator_passes_options_to_decoding(monkeypatch):
    """Fakes record the arguments of each decoding function."""
    calls: dict[str, Any] = {}

    def fake(name: str, answer: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls[name] = args, options
            return answer

        return call

    rows = SimpleNamespace(rows=lambda: [np.array([1, 0, 9, 3])])
    beams = SimpleNamespace(
        scores=np.array([[-1.5, -2.5]]), tokens=np.array([[[1, 0, 3], [4, 5, 6]]]),
        lengths=np.array([[3, 2]]),
    )  # fmt: skip
    done = [SimpleNamespace(id=n, error=None, end="stop", tokens=np.array([1, n])) for n in (2, 0)]
    for name, answer in (
        ("generate", SimpleNamespace(rows=lambda: [np.array([1, 0]), np.array([3])])),
        ("beam_search", beams), ("speculate", rows), ("serve_requests", done),
        ("init_cache", "cache"),
        ("_prefill", (None, "read")), ("fork", "forked"),
    ):  # fmt: skip
        monkeypatch.setattr(completion, name, fake(name, answer))
    monkeypatch.setattr(
        TextGenerator, "_step", lambda self: SimpleNamespace(check=fake("check", None))
    )
    monkeypatch.setattr(TextGenerator, "_empty", lambda self, *args: ("empty", *args))
    sampler, key = Sample(Temperature(0.5)), jax.random.key(7)
    of: dict[str, Any] = dict(sampler=sampler, key=key, stop_ids=(9,))
    writer = TextGenerator(ROTARY, {}, LETTERS, **of)
    assert writer.samples("bad", 5, 2) == ["ba", "d"]
    (_, _, tokens, cache), options = calls["generate"]
    assert (np.asarray(tokens).tolist(), cache) == ([[3], [3]], "forked")
    assert calls["_prefill"][0][2].tolist() == [[1, 0]] and calls["_prefill"][0][4].tolist() == [2]
    assert calls["check"][0][2].tolist() == [3 + 5 - 1] and calls["fork"][0] == ("read", 2)
    assert options == dict(num_tokens=5, sampler=sampler, key=key, processors=(), stop=(9,))

    assert writer.search("bad", 5, beams=3, results=2, length_penalty=0.5) == [
        (-1.5, "bad"),
        (-2.5, "ef"),
    ]
    (_, _, tokens, cache), options = calls["beam_search"]
    assert (np.asarray(tokens).tolist(), cache) == ([[1, 0, 3]], ("empty",))
    expected = dict(num_tokens=5, num_beams=3, num_results=2, stop=(9,))
    assert {name: options[name] for name in expected} == expected and options[
        "length_penalty"
    ].alpha == 0.5

    text, out = writer.look_up("bad", 5, 4)
    assert (text, out) == ("ba", rows)
    (_, _, tokens, cache), options = calls["speculate"]
    assert (np.asarray(tokens).tolist(), cache) == ([[1, 0, 3]], "cache")
    expected = dict(num_tokens=5, num_draft=4, sampler=sampler, key=key, processors=(), stop=(9,))
    assert {name: options[name] for name in expected} == expected
    for config, space in (
        (ROTARY, dict(capacity=200)), (replace(ROTARY, window=5), dict(capacity=204)),
        (replace(ROTARY, window=(5, None)), dict(capacity=200, slack=4)),
    ):  # fmt: skip
        TextGenerator(config, {}, LETTERS, cache_dtype="bfloat16", **of).look_up("bad", 5, 4)
        assert calls["init_cache"][1] == dict(batch=1, dtype="bfloat16") | space

    assert list(writer.answer(["bad", "a"], 5, slots=3, numbers=[0, 2])) == [(2, "bc"), (0, "ba")]
    (_, _, requests, cache), options = calls["serve_requests"]
    assert [one.prompt.tolist() for one in requests] == [[1, 0, 3], [0]]
    assert [(one.id, one.num_tokens) for one in requests] == [(0, 5), (2, 5)]
    for one in requests:
        text_key = jax.random.fold_in(key, one.id)
        first = jax.random.fold_in(jax.random.fold_in(text_key, 0), 0)
        assert key_of(one.key) == key_of(first)
    expected = dict(slots=3, capacity=200, sampler=sampler, processors=(), stop=(9,))
    assert (options, cache) == (expected, ("empty", 200))
    broken = SimpleNamespace(id=1, error="too long", end="refused", tokens=np.array([1]))
    monkeypatch.setattr(completion, "serve_requests", fake("serve_requests", [broken]))
    with pytest.raises(ValueError, match="prompt 1: too long"):
        list(writer.answer(["bad"], 5, slots=3))


def test_nearest_words_use_input_embedding():
    """With two vocabularies that of the sources, in the encoder of a recurrent model."""
    tables = {name: np.full((2, 3), i) for i, name in enumerate(("target", "source", "encoder"))}
    params = {"embed": {"tokens": tables["target"], "source_tokens": tables["source"]},
              "encoder": {"tokens": tables["encoder"]}}  # fmt: skip
    pair = replace(CONFIG, kind="encoder-decoder")
    recurrent = RecurrentConfig(vocab_size=11, d_embed=3, d_hidden=3)
    both = replace(recurrent, source_vocab_size=7)
    for config, name in (
        (CONFIG, "target"), (pair, "target"), (replace(pair, source_vocab_size=7), "source"),
        (recurrent, "target"), (both, "encoder"),
    ):  # fmt: skip
        model = LanguageModel(TextModel(config, params, LETTERS), "here")
        found = inspecting._input_embedding(model)
        assert found.dtype == np.float64 and (found == tables[name]).all()
