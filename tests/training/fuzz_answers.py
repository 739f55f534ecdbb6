"""Fuzzing of answer rows against transformers, with random tokenizers, templates and texts.

    python -m tests.training.fuzz_answers --minutes 1 --seed 0

A prompt has the tokens of transformers. An answer has the remaining tokens of the whole text or, if
that does not begin with the prompt's tokens, other tokens of the same text. A conversation that
transformers cannot render, does not write after the prompt, or changes must be rejected. An answer
that it shortens is learned in full.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from os.path import commonprefix
from pathlib import Path

import numpy as np
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Library

from tests.tokenizers.test_chat_template import LAYOUTS
from transformer_jax.config import ModelConfig, TrainConfig
from transformer_jax.tokenizers.hf_files import load_tokenizer_folder
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.data import IGNORE
from transformer_jax.training.tasks.chat import _examples
from transformer_jax.training.tasks.turns import (
    source_ids,
    talk_turns,
    target_ids,
    text_turn,
    tokenizer_of_talks,
)

WORDS = "yes no 2+2= 4 to be or  not\n Hello, world! é a b \t x<y {} [INST] ANSWER".split(" ")
CORPUS = ["yes no yes no to be or not to be", "user: Hello, world!\nassistant: yes\n", "2+2= 4 é"]
MARKS = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<tool>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEMPLATES = {
    "ChatML": CHATML,
    "ChatML that thinks": CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"),
    "ChatML that trims": CHATML.replace("m.content }}", "m.content | trim }}"),
    "ChatML that forgets": CHATML.replace(
        "{{ m.content", "{{ m.content if loop.last or m.role == 'user' else ''"
    ),
    "Qwen": CHATML.replace(
        "{{ m.content", "{{ '<think>\n\n</think>\n\n' if loop.last and m.role == 'assistant' "
        "else '' }}{{ m.content"
    ),
    "system": "{% if messages[0].role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n"
    "{% endif %}" + CHATML,
    "Llama 2": "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] "
    "{{ m.content.strip() }} [/INST]{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}",
    "Mistral": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{{ m.content }}[/INST]{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}",
    "Gemma": "{{ bos_token }}" + CHATML.replace("m.role", "'model' if m.role[0] == 'a' else m.role")
    .replace("assistant", "model").replace("m.content", "m.content | trim"),
    "strict": "{% if messages|length > 3 %}{{ raise_exception('too long') }}{% endif %}" + CHATML,
    "dated": "{{ strftime_now('%Y') }} " + CHATML,
    "plain, with a space": PLAIN,
    "plain, without one": PLAIN.replace(": ", ":"),
    "plain, with eos": PLAIN.replace("m.content }}\n", "m.content + eos_token }}\n"),
    "ChatML that shouts": CHATML.replace("m.content }}", "m.content | upper }}"),
    "ChatML that escapes": CHATML.replace("m.content }}", "m.content | e }}"),
    "ChatML of one line": CHATML.replace("m.content }}", "m.content | replace('\n', ' ') }}"),
    "ChatML without answers": CHATML.replace("m.content }}", "m.content if m.role[0] != 'a' }}"),
    "ChatML without a system": "{% set messages = messages | rejectattr('role', 'equalto', "
    "'system') | list %}" + CHATML,
    "Qwen 3": CHATML.replace(
        "{{ m.content", "{% set c = m.content.split('</think>') %}{% if m.role[0] == 'a' and "
        "loop.last %}{{ '<think>\n' + (c[0].split('<think>')[-1].strip('\n') if c[1:] else '') + "
        "'\n</think>\n\n' + c[-1].lstrip('\n') }}{% elif m.role[0] == 'a' %}{{ "
        "c[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}{{ ''"
    ),
}  # fmt: skip
TEMPLATES |= {f"layout of {name}": template for name, (template, _) in LAYOUTS.items()}
CUT = "(m.content if loop.last and whole or m.role[0] != 'a' else m.content"
for title, cut in {
    "DeepSeek": ".split('</think>')[-1])",
    "QwQ": ".split('</think>')[-1].lstrip('\n'))",
    "short": "[:7])",
}.items():
    template = CHATML.replace("m.content", CUT + cut)
    TEMPLATES[title] = template
    TEMPLATES[f"{title}, thinking"] = template.replace(
        "assistant\n{% endif", "assistant\n<think>\n{% endif"
    )


def draw_library(rng):
    """Return a small tokenizer of a random kind, and its name."""
    kind = str(rng.choice(["bytes", "bytes over spaces", "metaspace bpe", "unigram", "prepend"]))
    chance = lambda p: bool(rng.random() < p)  # noqa: E731
    size = int(rng.integers(280, 340))
    if kind.startswith("bytes"):
        library = Library(models.BPE())
        options = dict(add_prefix_space=chance(0.3), use_regex=kind == "bytes")
        library.pre_tokenizer = pre_tokenizers.ByteLevel(**options)
        library.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )  # fmt: skip
    else:
        letters = sorted(set("".join([*WORDS, *CORPUS, *TEMPLATES.values()])) | {"\u2581", "0"})
        scheme = str(rng.choice(["always", "first", "never"]))
        unk = dict(unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
        library = Library(models.BPE(unk_token="<unk>"))
        trainer = trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=letters, special_tokens=["<unk>"], show_progress=False
        )
        if kind == "unigram":
            library = Library(models.Unigram())
            trainer = trainers.UnigramTrainer(vocab_size=200, initial_alphabet=letters, **unk)
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        library.decoder = decoders.Metaspace(prepend_scheme=scheme)
        if kind == "prepend":
            library.pre_tokenizer = None
            library.normalizer = normalizers.Sequence(
                [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
            )
            library.decoder = decoders.Sequence(
                [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            )
        if kind == "metaspace bpe" and chance(0.3):
            library.normalizer = normalizers.NFKC()
        kind = f"{kind} {scheme}"
    library.train_from_iterator(CORPUS * 3, trainer)
    flags = [dict(lstrip=chance(0.1), rstrip=chance(0.1)) for _ in MARKS]
    marks = list(zip(MARKS, flags, strict=True))
    library.add_special_tokens([AddedToken(m, special=True, **f) for m, f in marks[:5]])
    library.add_tokens([AddedToken("<tool>", normalized=chance(0.5), **flags[5])])
    if chance(0.5):
        first = [("<s>", library.token_to_id("<s>"))]
        library.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=first
        )
    return library, kind


def words(rng):
    """Return a text of a few words, possibly with a space at either end."""
    ends = [str(rng.choice(["", "", " "])) for _ in range(2)]
    return ends[0] + " ".join(str(w) for w in rng.choice(WORDS, rng.integers(1, 5))) + ends[1]


def random_answer(rng):
    """Return an answer, possibly with reasoning at the start."""
    if rng.random() < 0.5:
        return words(rng)
    begin, space = (str(rng.choice(ends)) for ends in (["", "\n", "a "], ["", "\n", "\n\n", " "]))
    begin = str(rng.choice(["<think>", "", "a <think>"])) + begin
    return f"{begin}{words(rng)}{space}</think>{space}{words(rng)}"


def loose(text):
    """Return a text without spaces around it and around its reasoning."""
    return re.sub(r"\s*(</?think>)\s*", r"\1", text).strip()


def same(label, found, wanted):
    if list(map(int, found)) != list(map(int, wanted)):
        raise AssertionError(f"{label}: {list(map(int, found))}, transformers has {list(wanted)}")


def check(rng, folder):
    """Draw and check a case; return its description, or raise AssertionError if it is wrong."""
    import transformers

    library, kind = draw_library(rng)
    name = str(rng.choice(list(TEMPLATES)))
    library.save(str(folder / "tokenizer.json"))
    settings = dict(
        bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATES[name],
        tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False,
    )  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load_tokenizer_folder(folder)
    other = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    case = f"{kind}, {name}"
    marks = library.get_added_tokens_decoder().values()

    def ids(text):
        return other(text, add_special_tokens=False).input_ids

    def read(found):
        return other.decode([int(i) for i in found])

    roles = ["system"] * int(rng.random() < 0.3) + ["user", "assistant"] * int(rng.integers(1, 3))
    talk = [
        dict(role=r, content=random_answer(rng) if r == "assistant" else words(rng)) for r in roles
    ]
    wanted, refused = [], False
    for at, role in enumerate(roles):
        if role != "assistant":
            continue
        try:
            options = dict(tokenize=False)
            base = other.apply_chat_template(talk[:at], **options)
            prompt = other.apply_chat_template(talk[:at], add_generation_prompt=True, **options)
            for cut in (dict(), dict(whole=True)):  # for templates that shorten answers
                whole = other.apply_chat_template(talk[: at + 1], **options, **cut)
                tail = whole[len(commonprefix([base, whole])) :]  # noqa: RUF071
                if is_there := loose(talk[at]["content"]) in loose(tail):
                    break
            if name == "ChatML without answers":  # "a" is in "assistant"
                is_there = not loose(talk[at]["content"])
        except Exception:  # raised by the template
            refused = True
            continue
        wanted.append((prompt, whole))
        read_before = [m for m in talk[:at] if m["role"] != "assistant"]
        refused |= not whole.startswith(prompt) or not is_there
        refused |= any(loose(m["content"]) not in loose(prompt) for m in read_before)
        for i in range(at):  # dropped text may occur in another message
            if roles[i] != "assistant" and "assistant" not in roles[i:at]:
                changed = [*talk[:i], talk[i] | dict(content="\ue000"), *talk[i + 1 : at]]
                after = other.apply_chat_template(changed, add_generation_prompt=True, **options)
                refused |= after == prompt
    try:
        trained, _ = tokenizer_of_talks(loaded, "line 1", talk)
        turns = talk_turns(trained, "line 1", talk)
    except DataError as error:
        assert refused, f"{case}: {talk}: refused: {error}"
        assert "line 1" in str(error), error
        turns = []
    else:
        assert not refused, f"{case}: {talk}: must be refused"
        model = ModelConfig(vocab_size=400, max_len=2048, d_model=8, num_layers=1, num_heads=1)
        labels = [
            row.labels for row in _examples(TrainConfig(model=model), trained, "line 1", talk)
        ]
        learned = sum(len(turn.answer) for turn in turns)
        assert sum((row != IGNORE).sum() for row in labels) == learned, f"{case}: labels are lost"
    for turn, (prompt, whole) in zip(turns, wanted, strict=False):
        before, everything = ids(prompt), ids(whole)
        label = f"{case}: {talk}"
        same(f"{label}: prompt", turn.prompt, before)
        answer = list(turn.answer)
        assert set(answer) & set(trained.stop_ids), f"{label}: no end is learned"
        if everything[: len(before)] == before:
            rest = everything[len(before) :]
            same(f"{label}: answer", answer[: len(rest)], rest)
            assert len(answer) - len(rest) in (0, 1), label
        else:
            found, text = read([*before, *answer]), read(everything)
            if any(mark.lstrip or mark.rstrip for mark in marks):  # also strips the prompt's spaces
                found, text = ("".join(one.split()) for one in (found, text))
            rule = f"{label}: {found!r}, transformers has {text!r}"
            assert text in (found, found.removesuffix("</s>")), rule
    prompt, answer = words(rng), words(rng)
    turn = text_turn(loaded, prompt, answer)
    same(f"{case}: {prompt!r}", turn.prompt, other(prompt).input_ids)
    found, text = read(np.concatenate(turn)), read(other(prompt + answer).input_ids) + "</s>"
    assert found == text, f"{case}: {prompt!r}, {answer!r}: {found!r}, transformers has {text!r}"
    source = source_ids(loaded, prompt)
    same(f"{case}: source {prompt!r}", source[:-1], other(prompt).input_ids)
    target = loaded.decode(target_ids(loaded, answer), begins=False)
    normal = (
        library.normalizer.normalize_str(answer) if "NFKC" in str(library.normalizer) else answer
    )
    assert target == f"{normal}</s>", f"{case}: target {answer!r}: {target!r}"
    return case


def fuzz(seed, cases=None, seconds=float("inf")):
    """Check cases; return their number, and the failures with their seeds."""
    failed, number, end = [], 0, time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        while number != cases and time.monotonic() < end:
            try:
                check(np.random.default_rng([seed, number]), Path(folder))
            except AssertionError as error:
                failed.append(f"seed {seed}, case {number}: {error}")
            number += 1
    return number, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    number, failed = fuzz(args.seed, seconds=60 * args.minutes)
    print(f"{number} cases of seed {args.seed}: {len(failed)} wrong")
    print("\n".join(failed[:20]))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
