"""Rows of prompts and answers for published folders: contents, labels and end tokens."""

import dataclasses
import json
import re
from datetime import datetime

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from transformer_jax.checkpoints.run_folder import config_from_json, config_to_json
from transformer_jax.cli.generate import main as generate_command
from transformer_jax.config import ConfigError, ModelConfig, TrainConfig
from transformer_jax.config.prepare import PrepareConfig
from transformer_jax.config.tasks import ChatTask, LanguageTask, PreferenceTask, PrefixTask
from transformer_jax.corpus import prepare
from transformer_jax.decoding.completion import TextGenerator
from transformer_jax.decoding.samplers import Sample
from transformer_jax.loading import TextModel
from transformer_jax.models.factory import init_params
from transformer_jax.pretrained.save import save_pretrained
from transformer_jax.text.language_model import LanguageModel
from transformer_jax.text.save import token_ids, tokenizer_files
from transformer_jax.tokenizers import chat_template
from transformer_jax.tokenizers.hf_files import load_tokenizer_folder
from transformer_jax.tokenizers.special import end_ids, tokenizer_from_json
from transformer_jax.tokenizers.utf8 import DataError, byte_letters
from transformer_jax.training import processes
from transformer_jax.training.data import IGNORE
from transformer_jax.training.prepared import DocumentRows
from transformer_jax.training.tasks import Tokenizers, load_task
from transformer_jax.training.tasks.answers import answer_sources
from transformer_jax.training.tasks.turns import message_turn, prompt_ids, text_turn

pytestmark = pytest.mark.usefixtures("quick_compilation")

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
ENDLESS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FORGETS = CHATML.replace(
    "{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else '' }}"
)
CUTS = CHATML.replace(
    "m.content", "(m.content.split('</think>')[-1] if m.role == 'assistant' else m.content)"
)
DATED = "{{ strftime_now('%d %b %Y') }} " + CHATML


def byte_level():
    """Byte tokenizer with ` yes` as one token and special tokens from 260 on."""
    words = ["Ġy", "Ġye", "Ġyes", "es"]
    vocabulary = byte_letters() | {word: 256 + n for n, word in enumerate(words)}
    merges = [("Ġ", "y"), ("Ġy", "e"), ("Ġye", "s")]
    library = Library(models.BPE(vocab=vocabulary, merges=merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return library


def spaces(kind):
    """SentencePiece-like tokenizer: a mark replaces spaces, and one is added before a text."""
    letters = "\u2581abcdefghijklmnopqrstuvwxyzANSWER2+=4:|<>/_\n "
    vocabulary = {letter: n for n, letter in enumerate(dict.fromkeys(["<unk>", *letters]))}
    pieces = ["\u2581yes", "\u2581b"]
    vocabulary |= {piece: len(vocabulary) + n for n, piece in enumerate(pieces)}
    library = Library(
        models.Unigram([(t, 0.0 if t in pieces else -2.0) for t in vocabulary], unk_id=0)
    )
    if kind == "metaspace":
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        library.decoder = decoders.Metaspace(prepend_scheme="always")
    else:
        library.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        library.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    return library


MAKE = {
    "bytes": byte_level,
    "metaspace": lambda: spaces("metaspace"),
    "prepend": lambda: spaces("prepend"),
}


def folder(path, template=CHATML, kind="bytes", bos=False, **files):
    """Write the files of a published tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    library = MAKE[kind]()
    library.add_special_tokens(SPECIAL)
    if bos:
        library.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", library.token_to_id("<s>"))]
        )
    library.save(str(path / "tokenizer.json"))
    settings = dict(bos_token="<s>", eos_token="</s>", tokenizer_class="PreTrainedTokenizerFast")
    if template is not None:
        settings["chat_template"] = template
    settings |= files.pop("tokenizer_config", {})
    for name, content in {"tokenizer_config": settings, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return load_tokenizer_folder(path)


def talk(*texts):
    roles = ["user", "assistant"] * len(texts)
    return [dict(role=r, content=c) for r, c in zip(roles, texts, strict=False)]


def task_of(tmp_path, tokenizer, task, *lines, vocab_size=None):
    """Load a task with these lines, both for training and held out."""
    data = tmp_path / "data.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    data.write_text("".join(f"{text}\n" for text in texts))
    model = ModelConfig(
        vocab_size=vocab_size or tokenizer.vocab_size, d_model=8, num_layers=1, num_heads=1,
        max_len=97,
    )  # fmt: skip
    config = TrainConfig(
        model=model, task=task, data=str(data), val_data=str(data), tokenizer="pretrained",
        init_from=str(tmp_path), batch_size=2, out=str(tmp_path / "run"),
    )  # fmt: skip
    return load_task(config, Tokenizers(tokenizer))


def rows(task):
    """Return (whole row, its learned part) of each example."""
    found = []
    for bucket in task.train.buckets:
        for tokens, labels in zip(bucket.tokens, bucket.labels, strict=True):
            last = int(np.flatnonzero(labels != IGNORE)[-1])
            whole = [*tokens[: last + 1].tolist(), int(labels[last])]
            found.append((whole, labels[labels != IGNORE].tolist()))
    return found


def test_chat_turn_uses_template_text_and_labels_entire_answer(tmp_path):
    tokenizer = folder(tmp_path)
    messages = talk("a", "ANSWER", "b", "yes")
    task = task_of(tmp_path, tokenizer, ChatTask(packed=False), dict(messages=messages))
    ((whole, learned),) = rows(task)
    assert tokenizer.to_bytes(whole).decode() == tokenizer.chat(
        messages, add_generation_prompt=False
    )
    assert tokenizer.to_bytes(learned) == b"ANSWER<|im_end|>\nyes<|im_end|>\n"


def test_mismatched_generation_prompt_error_names_line(tmp_path):
    tokenizer = folder(tmp_path, THINKS)
    fine = dict(messages=talk("a", "<think>\nhm"))
    task = task_of(tmp_path, tokenizer, ChatTask(packed=False), fine)
    assert tokenizer.to_bytes(rows(task)[0][1]) == b"hm<|im_end|>\n"
    bad = dict(messages=talk("a", "ANSWER"))
    wanted = r"data.jsonl, line 2: message 2: the chat template prompts for it with '<think>\\n'"
    with pytest.raises(DataError, match=wanted):
        task_of(tmp_path, tokenizer, ChatTask(), fine, bad)
    pair = dict(prompt=talk("a"), chosen=talk("", "b")[1:], rejected=talk("", "c")[1:])
    with pytest.raises(DataError, match=r"line 1: chosen: the chat template prompts for it with"):
        task_of(tmp_path, tokenizer, PreferenceTask(), pair)


def test_answer_starts_at_token_boundary(tmp_path):
    tokenizer = folder(tmp_path, ENDLESS)
    task = task_of(tmp_path, tokenizer, ChatTask(packed=False), dict(messages=talk("a", "yes")))
    ((whole, learned),) = rows(task)
    prompt = tokenizer.encode("user: a\nassistant: ")
    assert whole[: len(prompt)] == prompt.tolist()
    assert tokenizer.to_bytes(learned) == b"yes\n</s>"
    turn = text_turn(tokenizer, "say ", "yes")
    assert turn.prompt.tolist() == tokenizer.encode("say ").tolist()
    assert tokenizer.to_bytes(turn.answer) == b"yes</s>"


def test_template_that_drops_earlier_text_starts_new_row(tmp_path):
    tokenizer = folder(tmp_path, FORGETS)
    messages = talk("ab", "cd", "ef", "gh")
    task = task_of(tmp_path, tokenizer, ChatTask(packed=False), dict(messages=messages))
    found = sorted(rows(task))
    assert len(found) == 2
    for number, (whole, learned) in zip((2, 4), sorted(found, key=lambda row: len(row[0])),
                                       strict=True):  # fmt: skip
        text = tokenizer.chat(messages[:number], add_generation_prompt=False)
        assert tokenizer.to_bytes(whole).decode() == text
        content = messages[number - 1]["content"]
        assert tokenizer.to_bytes(learned).decode() == f"{content}<|im_end|>\n"


@pytest.mark.parametrize("kind", ["metaspace", "prepend"])
def test_no_space_is_added_between_prompt_and_answer(tmp_path, kind):
    tokenizer = folder(tmp_path, None, kind)
    pair = dict(prompt="2+2=", chosen="4", rejected="yes b")
    task = task_of(tmp_path, tokenizer, PreferenceTask(), pair)
    halves = task.train.buckets[0].tokens[0].reshape(2, -1)
    labels = task.train.buckets[0].labels[0].reshape(2, -1)
    for tokens, learned, text in zip(halves, labels, ("2+2=4", "2+2=yes b"), strict=True):
        last = int(np.flatnonzero(learned != IGNORE)[-1])
        whole = [*tokens[: last + 1].tolist(), int(learned[last])]
        assert tokenizer.decode(whole) == f"{text}</s>"
        assert tokenizer.to_bytes(learned[learned != IGNORE].tolist()).decode() == f"{text[4:]}</s>"
    # if the prompt's tokens are not a prefix of the whole's
    assert tokenizer.decode(np.concatenate(text_turn(tokenizer, "a ", "yes"))) == "a yes</s>"
    task = task_of(tmp_path, tokenizer, PrefixTask(packed=False), "2+2=\t4 b")
    ((whole, learned),) = rows(task)
    assert tokenizer.to_bytes(learned) == b"4 b</s>"


def test_text_begins_with_tokenizer_prefix(tmp_path):
    tokenizer = folder(tmp_path, None, bos=True)
    bos, eos = (tokenizer.special_ids[role] for role in ("bos", "eos"))
    turn = text_turn(tokenizer, "ab", "c")
    assert [t.tolist() for t in turn] == [
        [bos, *tokenizer.encode("ab")],
        [*tokenizer.encode("c"), eos],
    ]
    assert prompt_ids(tokenizer, "ab").tolist() == turn.prompt.tolist()
    task = task_of(tmp_path, tokenizer, PrefixTask(packed=False), "ab\tc")
    assert rows(task)[0][0] == [bos, *tokenizer.encode("ab"), eos, *tokenizer.encode("c"), eos]


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, [261]),
        (dict(config=dict(eos_token_id=[261, 263])), [261, 263]),
        (dict(config=dict(eos_token_id=263)), [263]),
        (dict(config=dict(eos_token_id=None)), [261]),
        (dict(config=dict(eos_token_id=[261, 263]), generation_config={}), [261, 263]),
        (dict(config=dict(eos_token_id=9), generation_config=dict(eos_token_id=[263, 261])),
         [263, 261]),
        (dict(config=dict(eos_token_id=9), tokenizer_config=dict(eos_token=None)), [9]),
        (dict(config=dict(eos_token_id=[261, 9999])), [261]),
    ],
)  # fmt: skip
def test_end_tokens_are_read_from_first_file_defining_them(tmp_path, files, ids):
    tokenizer = folder(tmp_path, **files)
    assert list(tokenizer.stop_ids) == ids
    assert tokenizer_from_json(tokenizer.to_json()) == tokenizer
    written = token_ids(tokenizer, "decoder", 265)["eos_token_id"]
    assert sorted([written] if isinstance(written, int) else written) == sorted(ids)


@pytest.mark.parametrize("preference", [False, True])
def test_template_end_token_stops_generation(tmp_path, preference):
    tokenizer = folder(tmp_path)
    assert tokenizer.stop_ids == (261,)  # </s>, which ends no turn
    line, task = dict(messages=talk("a", "b")), ChatTask()
    if preference:
        line = dict(prompt=talk("a"), chosen=talk("", "b")[1:], rejected=talk("", "c")[1:])
        task = PreferenceTask()
    found = task_of(tmp_path, tokenizer, task, line)
    coder = found.tokenizers.tokenizer
    assert end_ids(coder) == coder.stop_ids == (261, 263)
    assert found.end is None and "learned after" not in found.described()
    assert token_ids(coder, "decoder", 265)["eos_token_id"] == [261, 263]
    again = task_of(
        tmp_path, tokenizer_from_json(coder.to_json()), task, line
    )  # like a resumed run
    assert again.tokenizers.tokenizer == coder


def test_template_without_end_token_is_reported_and_eos_is_learned(tmp_path):
    tokenizer = folder(tmp_path, ENDLESS)
    messages = talk("a", "b", "c", "d </s>")
    task = task_of(tmp_path, tokenizer, ChatTask(packed=False), dict(messages=messages))
    line = "the chat template does not end assistant turns: '</s>' is learned after each"
    assert task.described().endswith(line)
    assert [learned[-1] for _, learned in rows(task)] == [261, ord("\n")]  # already in the template
    nothing = folder(tmp_path / "none", ENDLESS, tokenizer_config=dict(eos_token=None))
    with pytest.raises(DataError, match="no eos_token: nothing would end an answer"):
        task_of(tmp_path, nothing, ChatTask(), dict(messages=messages))


@pytest.mark.parametrize(
    ("task", "line", "where"),
    [
        (ChatTask(), dict(messages=talk("a", "b")), "line 1: it has token 262"),
        (
            PreferenceTask(),
            dict(prompt="a", chosen="b", rejected="c"),
            "line 1: chosen: it has token",
        ),
        (
            PrefixTask(),
            "a\tb",
            "line 1: it has token 261, '</s>', but the model has only 257 tokens",
        ),
    ],
)
def test_token_unknown_to_model_error_names_line(tmp_path, task, line, where):
    with pytest.raises(DataError, match=f"data.jsonl, {where}"):
        task_of(tmp_path, folder(tmp_path), task, line, vocab_size=257)


@pytest.mark.slow
def test_invalid_prompt_raises_one_line_error(tmp_path):
    tokenizer = folder(tmp_path)
    model = ModelConfig(vocab_size=257, d_model=8, num_layers=1, num_heads=1, max_len=17)
    params = init_params(model, jax.random.key(0))
    options = dict(sampler=Sample(), key=jax.random.key(0))
    message = "the prompt contains ID 263, but the model has only 257 tokens"
    with pytest.raises(ValueError, match=message):
        TextGenerator(model, params, tokenizer, **options).complete("<|im_end|>", 3)
    config = TrainConfig(model=model, task=PrefixTask(), init_from="x", tokenizer="pretrained")
    with pytest.raises(DataError, match="prompt is 'a': it has token 261"):
        answer_sources(config, Tokenizers(tokenizer), params, ["a"])


def test_template_date_is_run_start_date(tmp_path, monkeypatch):
    tokenizer, line = folder(tmp_path, DATED), dict(messages=talk("a", "b"))

    class Clock(datetime):
        day = 3

        @classmethod
        def now(cls, tz=None):
            return datetime(2031, 5, cls.day, 7)

    for module in (processes, chat_template):
        monkeypatch.setattr(module, "datetime", Clock)
    first = task_of(tmp_path, tokenizer, ChatTask(packed=False), line)
    coder = first.tokenizers.tokenizer
    assert coder.to_bytes(rows(first)[0][0]).startswith(b"03 May 2031 ")
    Clock.day = 4  # a new run has today's date; a resumed one keeps its own
    again = task_of(tmp_path, tokenizer_from_json(coder.to_json()), ChatTask(packed=False), line)
    assert rows(again) == rows(first) and again.tokenizers == first.tokenizers
    other = task_of(tmp_path, tokenizer, ChatTask(packed=False), line)
    assert other.tokenizers.tokenizer.to_bytes(rows(other)[0][0]).startswith(b"04 May 2031 ")
    written = json.loads(tokenizer_files(coder, 1)[0]["tokenizer_config.json"])
    assert written["chat_template"] == DATED
    plain = task_of(tmp_path, folder(tmp_path), ChatTask(packed=False), line)
    assert plain.tokenizers.tokenizer.now is None
    with pytest.raises(DataError, match="now is 'today': must be like '2026-11-26T13:10:00'"):
        dataclasses.replace(coder, now="today")


REASONED = "<think>\nlong reasoning</think>42"


@pytest.mark.parametrize("thinks", [False, True])
def test_answer_shortened_by_template_is_learned_in_full(tmp_path, thinks):
    template = CUTS
    if thinks:  # and prompts for the reasoning
        template = CUTS.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    tokenizer = folder(tmp_path, template)
    messages = talk("a", REASONED, "b", REASONED.replace("42", "43"))
    task = task_of(tmp_path, tokenizer, ChatTask(packed=False), dict(messages=messages))
    found = sorted((tokenizer.to_bytes(ids).decode() for ids, _ in rows(task)), key=len)
    learned = [tokenizer.to_bytes(ids).decode() for _, ids in rows(task)]
    begun = "<think>\n" if thinks else ""
    assert sorted(learned) == sorted(
        m["content"].removeprefix(begun) + "<|im_end|>\n" for m in messages[1::2]
    )
    question = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert found[0] == question.format("a") + f"{REASONED}<|im_end|>\n"
    # earlier answers are read as when the model is used, without their reasoning
    before = question.format("a") + "42<|im_end|>\n" + question.format("b")
    assert found[1] == before + f"{messages[-1]['content']}<|im_end|>\n"
    pair = dict(prompt=talk("a"), chosen=messages[1:2], rejected=messages[3:])
    task = task_of(tmp_path, tokenizer, PreferenceTask(), pair)
    labels = task.train.buckets[0].labels[0].reshape(2, -1)
    for half, message in zip(labels, messages[1::2], strict=True):
        learned = tokenizer.to_bytes(half[half != IGNORE].tolist()).decode()
        assert learned == message["content"].removeprefix(begun) + "<|im_end|>\n"


@pytest.mark.slow
def test_scored_messages_include_text_dropped_by_template(tmp_path):
    tokenizer = folder(tmp_path, CUTS)
    config = ModelConfig(vocab_size=265, d_model=8, num_layers=1, num_heads=1, max_len=97)
    params = init_params(config, jax.random.key(0))
    score = LanguageModel(TextModel(config, params, tokenizer), "here").score(talk("a", REASONED))
    assert "".join(score.tokens) == f"{REASONED}<|im_end|>\n"


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("m.content | upper", "writes its content 'Be <b>' as 'BE <B>'"),
        ("m.content | e", "writes its content 'Be <b>' as 'Be &lt;b&gt;'"),
        ("m.content | replace(' ', '_')", "writes its content 'Be <b>' as 'Be_<b>'"),
        ("m.content if m.role == 'user'", "writes its content 'Be <b>' as ''"),
        ("m.content + ' ' + m.content", "writes its content 'Be <b>' 2 times"),
        ("m.content if m.role != 'system'", "does not write message 1, 'Rule', unchanged"),
        ("m.content if m.role != 'user'", "does not write message 2, 'Ask', unchanged"),
    ],
)
def test_error_names_line_if_template_changes_message(tmp_path, written, reason):
    tokenizer = folder(tmp_path, CHATML.replace("m.content", written))
    messages = [dict(role="system", content="Rule"), *talk("Ask", "Be <b>")]
    remedy = "change the file, or the chat_template of the tokenizer"
    where = r"data.jsonl, line 1: message 3: the chat template "
    with pytest.raises(DataError, match=where + re.escape(f"{reason}: {remedy}")):
        task_of(tmp_path, tokenizer, ChatTask(), dict(messages=messages))
    pair = dict(prompt=messages[:2], chosen=messages[2:], rejected=talk("", "c")[1:])
    with pytest.raises(DataError, match="line 1: chosen: the chat template " + re.escape(reason)):
        task_of(tmp_path, tokenizer, PreferenceTask(), pair)


def test_dropped_message_is_detected_despite_identical_message(tmp_path):
    tokenizer = folder(tmp_path, CHATML.replace("m.content", "m.content if loop.index0 != 2"))
    task_of(tmp_path, tokenizer, ChatTask(), dict(messages=talk("Ask", "b")))
    with pytest.raises(DataError, match=r"line 1: message 4: .* does not write message 3, 'Ask'"):
        task_of(tmp_path, tokenizer, ChatTask(), dict(messages=talk("Ask", "b", "Ask", "c")))
    quotes = folder(tmp_path, CHATML.replace("m.content", "m.content | tojson(ensure_ascii=true)"))
    task_of(tmp_path, quotes, ChatTask(), dict(messages=talk("Ask", "b")))


def test_extra_message_fields_are_learned_or_rejected(tmp_path):
    thought = CHATML.replace("{{ m.content", "{{ m.reasoning_content }}{{ m.content")
    answer = dict(role="assistant", content="b", reasoning_content="so")
    line = dict(messages=[*talk("a"), answer])
    task = task_of(tmp_path, folder(tmp_path, thought), ChatTask(packed=False), line)
    assert task.tokenizers.tokenizer.to_bytes(rows(task)[0][1]) == b"sob<|im_end|>\n"
    shout = folder(tmp_path, thought.replace("content }}{{", "content | upper }}{{"))
    for tokenizer, field, value in (
        (shout, "reasoning_content", "so"),
        (folder(tmp_path), "thinking", "so"),
        (folder(tmp_path), "tool_calls", [dict(function=dict(name="f", arguments="{}"))]),
    ):
        line = dict(messages=[*talk("a"), dict(role="assistant", content="b") | {field: value}])
        rule = f"line 1: message 2: the chat template does not write its {field} unchanged"
        with pytest.raises(DataError, match=rule):
            task_of(tmp_path, tokenizer, ChatTask(), line)
        with pytest.raises(DataError, match=f"line 1: message 2: has {field}, which needs"):
            task_of(tmp_path, folder(tmp_path, None), ChatTask(), line)
        line["messages"][1][field] = None
        task_of(tmp_path, folder(tmp_path), ChatTask(), line)
    line["messages"][1]["weight"] = 0
    with pytest.raises(DataError, match="line 1: message 2 has weight 0: must be 1, since all"):
        task_of(tmp_path, folder(tmp_path), ChatTask(), line)


def test_chat_template_error_names_line(tmp_path):
    picky = "{% if messages|length > 2 %}{{ raise_exception('too long') }}{% endif %}" + CHATML
    tokenizer = folder(tmp_path, picky)
    short, long = (dict(messages=talk(*texts)) for texts in ("ab", "abcd"))
    with pytest.raises(DataError, match=r"line 2: message 4: chat template: too long"):
        task_of(tmp_path, tokenizer, ChatTask(), short, long)
    greeting = dict(messages=talk("a", "b")[1:])
    with pytest.raises(
        DataError, match=r"line 1: message 1: is from the assistant: a chat template"
    ):
        task_of(tmp_path, tokenizer, ChatTask(), greeting)


def test_training_rows_match_inference_prompts(tmp_path):
    tokenizer = folder(tmp_path)
    messages = talk("a", "b", "c", "d")
    turn = message_turn(tokenizer, messages)
    assert turn.prompt.tolist() == prompt_ids(tokenizer, messages[:-1]).tolist()


def test_random_chat_rows_match_transformers():
    pytest.importorskip("transformers")
    from tests.training.fuzz_answers import fuzz

    number, failed = fuzz(seed=5, cases=25)
    assert number == 25 and not failed, failed


def test_no_space_is_added_before_continuation(tmp_path):
    tokenizer = folder(tmp_path, None, "metaspace")
    rest = tokenizer.encode("b</s>b", begins=False)
    usual = tokenizer.encode("b</s>b")
    assert tokenizer.to_bytes(rest) == b"b</s> b" and tokenizer.to_bytes(usual) == b" b</s> b"


@pytest.mark.slow_except("True")
@pytest.mark.parametrize("messages", [False, True])
def test_preference_run_uses_training_prompt_format(tmp_path, messages):
    tokenizer = folder(tmp_path)  # with a chat template
    line = dict(prompt="a", chosen="b", rejected="c")
    if messages:
        line = dict(prompt=talk("a"), chosen=talk("", "b")[1:], rejected=talk("", "c")[1:])
    task = task_of(tmp_path, tokenizer, PreferenceTask(), line)
    config = config_from_json(config_to_json(task.config))
    coder = task.tokenizers.tokenizer
    assert config.task.messages is messages
    model = LanguageModel(TextModel(config.model, {}, coder, run=config), "here")
    assert model.kind == ("chat" if messages else "text")
    read = model.read_messages if messages else model.read
    learned = message_turn(coder, talk("a", "b")) if messages else text_turn(coder, "a", "b")
    assert read("a").tolist() == learned.prompt.tolist()
    with pytest.raises(ConfigError, match=f"messages is {not messages}, but the data has "):
        task_of(tmp_path, tokenizer, PreferenceTask(messages=not messages), line)


@pytest.mark.parametrize("bos", [False, True])
def test_documents_begin_with_tokenizer_prefix(tmp_path, monkeypatch, bos):
    tokenizer = folder(tmp_path, None, bos=bos)
    first, end = (tokenizer.special_ids[role] for role in ("bos" if bos else "eos", "eos"))
    texts = [f"{n} ab" for n in range(23)]
    wanted = sorted([first, *tokenizer.encode(text).tolist(), end] for text in texts)
    task = task_of(tmp_path, tokenizer, LanguageTask(documents="lines", packed=False), *texts)
    assert sorted(whole for whole, _ in rows(task)) == wanted

    settings = PrepareConfig(
        data=(str(tmp_path / "data.jsonl"),), documents="lines", tokenizer=str(tmp_path),
        val_fraction=0.3,
    )  # fmt: skip
    corpus = prepare(settings, tmp_path / "prepared", tokenizer=tokenizer)
    found = []
    for part in (corpus.train, corpus.val):
        layout = DocumentRows(part, 31, packed=False)
        for row in range(len(layout)):
            tokens, labels = np.full(31, -1, np.int32), np.full(31, IGNORE, np.int32)
            layout.read(row, tokens, labels, None)
            found.append([*tokens[tokens >= 0].tolist(), int(labels[labels != IGNORE][-1])])
    assert sorted(found) == wanted

    read = []
    monkeypatch.setattr(TextGenerator, "complete", lambda _, ids, count: read.append(ids) or "")
    task.sample(None)
    assert [ids.tolist() for ids in read] == [[first]]


def test_converted_end_tokens_are_in_model_vocabulary(tmp_path):
    tokenizer = folder(tmp_path, config=dict(eos_token_id=[261, 263]))  # </s> and <|im_end|>
    assert token_ids(tokenizer, "decoder", 263)["eos_token_id"] == 261
    found = token_ids(tokenizer, "decoder", 257)
    assert found["eos_token_id"] is None and found["bos_token_id"] is None


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["ban", "force"])
def test_stop_text_unknown_to_model_raises_one_line_error(tmp_path, capsys, flag):
    tokenizer = folder(tmp_path / "tokenizer")
    model = ModelConfig(
        vocab_size=257, d_model=8, num_layers=1, num_heads=1, max_len=17, use_bias=False,
        norm="rmsnorm", positions="rope", activation="silu", glu=True,
    )  # fmt: skip
    files, _ = tokenizer_files(tokenizer, 257)
    save_pretrained(tmp_path / "model", model, init_params(model, jax.random.key(0)), files=files)
    flags = ["--model", str(tmp_path / "model"), "--prompt", "a", "--num-tokens", "2"]
    assert generate_command([*flags, f"--{flag}", "b<|im_end|>"]) == 2
    error = capsys.readouterr().err
    message = "has token ID 263, but the model has only 257 tokens"
    assert error == f"generate: {flag} is 'b<|im_end|>': {message}\n"


def test_conversation_with_tools_error_names_line(tmp_path):
    lines = {
        ChatTask(): dict(messages=talk("a", "b")),
        PreferenceTask(): dict(prompt="a", chosen="b", rejected="c"),
    }
    for task, line in lines.items():
        with pytest.raises(
            DataError, match=r"data.jsonl, line 1 has tools, which are not supported"
        ):
            task_of(tmp_path, folder(tmp_path), task, line | dict(tools=[dict(name="f")]))
        task_of(tmp_path, folder(tmp_path), task, line | dict(tools=None))


def test_ignored_generation_marks_are_reported(tmp_path):
    marked = CHATML.replace("{{ m.content", "{% generation %}{{ m.content").replace(
        "\n{% endfor", "{% endgeneration %}\n{% endfor"
    )
    task = task_of(tmp_path, folder(tmp_path, marked), ChatTask(), dict(messages=talk("a", "b")))
    line = "marks {% generation %} are ignored: every answer is learned in full, with its end"
    assert task.described().endswith(line)


def test_answers_with_equal_tokens_error_names_line(tmp_path):
    tokenizer = folder(tmp_path, CHATML.replace("m.content", "m.content | trim"))
    pair = dict(prompt=talk("a"), chosen=talk("", "b")[1:], rejected=talk("", "b ")[1:])
    with pytest.raises(DataError, match=r"line 1: chosen and rejected have the same tokens"):
        task_of(tmp_path, tokenizer, PreferenceTask(), pair)
