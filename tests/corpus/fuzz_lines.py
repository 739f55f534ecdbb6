"""Write random texts with many encodings, line ends and file names, and compare all readers.

    python -m tests.corpus.fuzz_lines --minutes 1 --seed 0

Python's text files define the expected lines and documents (`lines`, `documents` below). Each
reader must refuse a file that is not UTF-8, with a one-line message that names it.
"""

import argparse
import bz2
import gzip
import io
import itertools
import json
import lzma
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from transformer_jax.cli import generate
from transformer_jax.config import ConfigError, ModelConfig, TrainConfig
from transformer_jax.config.prepare import PrepareConfig
from transformer_jax.config.tasks import (
    ChatTask,
    ClassifyTask,
    LanguageTask,
    PreferenceTask,
    Seq2SeqTask,
)
from transformer_jax.corpus import documents as reading
from transformer_jax.corpus import prepare
from transformer_jax.corpus.prepare import part_of
from transformer_jax.tokenizers.hf_files import load_tokenizer_folder
from transformer_jax.tokenizers.utf8 import DataError
from transformer_jax.training.data import load_dataset
from transformer_jax.training.tasks.chat import read_objects
from transformer_jax.training.tasks.language import LanguageDocuments
from transformer_jax.training.tasks.pairs import read_pairs

PIECES = [
    *"abé\u05d0\U0001f469\u200d", "word ", " ", "\t", "\0", "\ufeff", "\u2028", "\u2029", "\x85",
    "\f", "\v", "\x1c", "\x1d", "\x1e", "\x1f", "\u00a0", "\u3000", '"', "\\",
]  # fmt: skip
ENDS = "\n", "\n", "\r\n", "\r\n", "\r", "mixed"
ENCODINGS = (
    ("utf-8",) * 5 + ("utf-8-sig",) * 4 + ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "cut")
)
PACKINGS = (None,) * 12 + (gzip.compress, bz2.compress, lzma.compress)
SUFFIXES = "", ".txt", ".TXT", ".jsonl", ".JSONL", ".Jsonl", ".gz", ".zst", ".GZ"


def lines(content):
    """Return the lines of a file as Python reads them."""
    with io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", newline=None) as file:
        return [line.removesuffix("\n") for line in file]


def documents(content, kind):
    """Return the documents of a file: groups of lines, without surrounding blank lines."""
    groups = [[]]
    for line in lines(content):
        if line.strip() or kind == "files":
            groups[-1].append(line)
        if kind == "lines" or (kind == "paragraphs" and not line.strip()):
            groups.append([])
    texts = ["\n".join(group).strip("\n") for group in groups]
    return [text for text in texts if text.strip()]


class Case:
    """A random text, its encoding, and a folder for its files."""

    def __init__(self, seed, folder):
        self.random, self.folder = random.Random(seed), Path(folder)
        pick = self.random.choice
        self.end, self.encoding, self.packing = pick(ENDS), pick(ENCODINGS), pick(PACKINGS)
        self.suffix, self.marked = pick(SUFFIXES), self.random.random() < 0.3
        self.blank = pick([0, 0, 0.3])
        self.texts = [self.text() for _ in range(self.random.randrange(1, 30))]
        if "\0" in "".join(self.texts)[:4]:  # U+0000 and a letter, twice, would look like UTF-16
            self.texts[0] = f"word {self.texts[0]}"
        self.last = pick(["", "\n"])
        self.valid = self.encoding in ("utf-8", "utf-8-sig") and self.packing is None

    def text(self):
        if self.random.random() < self.blank:
            return self.random.choice(["", "", " ", "\t ", "\u2028", "\f"])
        return "".join(self.random.choices(PIECES, k=self.random.randrange(1, 9)))

    def write(self, name, texts):
        """Write the lines in the encoding of this case, and return the file."""
        ends = [self.random.choice(["\n", "\r\n", "\r"]) if self.end == "mixed" else self.end
                for _ in texts]  # fmt: skip
        if not self.last:
            ends[-1] = ""
        whole = "".join(text + end for text, end in zip(texts, ends, strict=True))
        if self.encoding in (
            "utf-16-le",
            "utf-16-be",
        ):  # detected by two ASCII letters at the start
            whole = f"ab{whole}"
        if self.encoding == "cut":  # a letter of two bytes, cut after the first
            content = (whole + "é").encode()[:-1] + b"z\n"
        else:
            content = whole.encode(self.encoding)
        file = self.folder / (name + self.suffix)
        file.write_bytes(self.packing(content) if self.packing else content)
        return file


def compare(case, name, file, read, expected):
    """Return an error message if a reader does not return `expected`; None expects a refusal."""
    refuses = not case.valid or expected is None
    try:
        found = read()
        wrong = f"reads {found!r:.200}, not {expected!r}" if refuses or found != expected else None
    except (DataError, ConfigError) as error:
        one_line = str(file) in str(error) and "\n" not in str(error)
        wrong = None if refuses and one_line else f"refuses: {str(error)!r}"
    return None if wrong is None else f"{name} of {file.name}: {wrong}"


def config(task, file, **changes):
    model = ModelConfig(kind=task.shapes[0], d_model=8, num_heads=2, num_layers=1, max_len=4096)
    usual = dict(tokenizer="byte", val_data=str(file), batch_size=2)
    return TrainConfig(task=task, model=model, data=str(file), **usual | changes)


def check(seed, folder):
    """Yield the name of each reader and an error message or None, for one text."""
    case = Case(seed, folder)
    file = case.write("text", case.texts)
    content = file.read_bytes()
    plain = lines(content) if case.valid else []
    full = [line for line in plain if line.strip()]

    for kind in ("lines", "paragraphs", "files"):
        expected = documents(content, kind) if case.valid else None
        task = LanguageTask(documents=kind, packed=False)
        yield f"train {kind}", compare(
            case, f"train {kind}", file, lambda task=task: _trained(config(task, file)),
            sorted(expected) if expected else None,
        )  # fmt: skip
        yield f"prepare {kind}", _prepared(case, kind, file, expected)

    body = content.removeprefix(b"\xef\xbb\xbf")
    for name in ("char", "byte"):
        if name == "byte" and not case.valid:
            continue  # the byte tokenizer reads any file
        expected = body.decode() if case.valid else None
        if case.valid and len(expected if name == "char" else body) < 3:
            expected = None  # too short for a window
        task = config(LanguageTask(), file, tokenizer=name, context=2)
        yield (
            f"windows {name}",
            compare(
                case,
                f"windows {name}",
                file,
                lambda task=task: _whole(load_dataset(task)),
                expected,
            ),
        )

    yield (
        "prompts",
        compare(case, "prompts", file, lambda: generate._prompts(str(file)), full or None),
    )
    yield "prompts, each", compare(
        case, "prompts, each", file, lambda: generate._prompts(str(file), every_line=True),
        full if full and full == plain else None,
    )  # fmt: skip

    whole = full == plain and full
    task = config(Seq2SeqTask(), file)
    yield "parallel", compare(
        case, "parallel", file,
        lambda: [(p.source, p.target, p.where)
                 for p in read_pairs(task, "data", str(file), str(file))[0]],
        [(t, t, f"{file}, line {n}") for n, t in enumerate(plain, 1)] if whole else None,
    )  # fmt: skip
    texts = [text.replace("\t", " ") for text in case.texts]
    texts = [text if text.strip() else "x" for text in texts]
    for name, task in (("pairs", Seq2SeqTask()), ("labels", ClassifyTask())):
        pairs = case.write(name, [f"l{n % 3}\t{text}" for n, text in enumerate(texts)])
        expected = [line.split("\t") for line in lines(pairs.read_bytes())] if case.valid else None
        task = config(task, pairs)
        yield name, compare(
            case, name, pairs,
            lambda pairs=pairs, task=task: [
                [p.source, p.target] for p in read_pairs(task, "data", str(pairs), None)[0]
            ],
            expected,
        )  # fmt: skip

    objects = [
        [json.dumps({"text": t}, ensure_ascii=False)] + [""] * (case.random.random() < case.blank)
        for t in case.texts
    ]
    chats = case.write("objects", [line for group in objects for line in group])
    for name, task in (("chat", ChatTask()), ("preference", PreferenceTask())):
        yield name, compare(
            case, name, chats,
            lambda task=task: [v for _, v in read_objects(
                config(task, chats, **_from(task)), "objects", lambda where, value: value["text"]
            )[0]],
            case.texts,
        )  # fmt: skip
    yield "prepare jsonl", _prepared(case, "jsonl", chats, [t for t in case.texts if t.strip()])

    words = dict.fromkeys(["[UNK]", *(line for line in plain if line)])
    if case.valid:
        yield "vocab.txt", _vocabulary(case, list(words))


def _from(task):
    return dict(init_from="x", tokenizer="pretrained") if isinstance(task, PreferenceTask) else {}


def _trained(config):
    """Return the documents of a run's held-out part, which is the whole file."""
    task = LanguageDocuments(config, None, None)
    found = []
    for bucket in task.val.buckets:
        for labels in bucket.labels:
            ids = [int(i) for i in labels[labels >= 0]]
            found.append(task.tokenizers.tokenizer.to_bytes(ids).decode())
    return sorted(found)


def _whole(data):
    """Return the text of a run's held-out part, which is the whole file."""
    return data.tokenizer.to_bytes(int(i) for i in data.val).decode()


def _prepared(case, kind, file, expected):
    """Compare the output of the prepare command with small chunks."""
    out = case.folder / f"{kind} {case.random.random()}"
    reading.BLOCK = case.random.choice([1, 2, 3, 7, 64, 2**20])

    def read():
        settings = PrepareConfig(
            data=(str(file),), documents=kind, tokenizer="byte", val_fraction=0.5
        )
        corpus = prepare(settings, out, chunk_bytes=case.random.choice([1, 5, 17, 10**6]))
        found = {}
        for name in ("train", "val"):
            part = getattr(corpus, name)
            bounds, tokens = part.bounds(), np.empty(part.tokens, part.dtype)
            part.read(0, tokens)
            pairs = itertools.pairwise(bounds)
            found[name] = [corpus.tokenizer.to_bytes(tokens[a + 1 : b].tolist()).decode()
                           for a, b in pairs]  # fmt: skip
        return found

    parts = None
    if expected:
        parts = {
            name: [t for t in expected if part_of(t, 0.5) == name] for name in ("train", "val")
        }
        if not all(parts.values()):  # the error about empty parts names no file
            return None
    if case.valid and parts is None:  # the error about missing documents names the data
        return None
    return compare(case, f"prepare {kind}", file, read, parts)


def _vocabulary(case, words):
    """Compare the ids of a vocabulary file with its lines."""
    folder = case.folder / "vocabulary"
    folder.mkdir()
    plain = case.suffix
    case.suffix = ""
    file = case.write("vocab", words)
    file.rename(folder / "vocab.txt")
    case.suffix = plain
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')

    def read():
        tokenizer = load_tokenizer_folder(folder)
        found = json.loads(tokenizer.definition)["model"]["vocab"]
        return sorted(found, key=found.get)

    return compare(case, "vocab.txt", folder / "vocab.txt", read, words)


def fuzz(seeds, until=float("inf")):
    """Return the number of texts, the number of calls of each reader, and the error messages."""
    count, calls, failed = 0, {}, []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            for name, wrong in check(seed, folder):
                calls[name] = calls.get(name, 0) + 1
                if wrong:
                    failed.append(f"seed {seed}: {wrong}")
        count += 1
        if time.monotonic() > until or len(failed) > 20:
            break
    return count, calls, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    first = time.time_ns() % 10**9 if args.seed is None else args.seed
    print(f"first seed {first}", flush=True)
    until = time.monotonic() + 60 * args.minutes
    count, calls, failed = fuzz(range(first, first + 10**9), until)
    print(f"{count} texts, {sum(calls.values())} readings, {len(failed)} wrong")
    print(", ".join(f"{name} {times}" for name, times in sorted(calls.items())))
    print("\n".join(failed[:20]))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
