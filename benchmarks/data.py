"""Speed and memory of preparing, checking, and reading data.

    python -m benchmarks.data --megabytes 500 --folder /tmp/data --context 512 --batch-size 16

Random words are converted to a folder with the specified number of megabytes (10^6 bytes) of
tokens, which is kept for later runs. Then three variants of training steps of a small decoder are
measured alternately: with the same batch in every step, which costs nothing; with batches that are
read on demand; and with batches that are prefetched.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import jax
import numpy as np

from transformer_jax.config import ModelConfig, TrainConfig
from transformer_jax.config.prepare import PrepareConfig
from transformer_jax.config.tasks import LanguageTask
from transformer_jax.corpus import Corpus, Part, is_prepared, open_corpus, prepare
from transformer_jax.training.batch import batch_loss
from transformer_jax.training.optimizers import make_optimizer
from transformer_jax.training.step import init_state, make_train_step
from transformer_jax.training.tasks import load_task
from transformer_jax.training.tasks.prepared import PreparedText


def write_text(file: Path, size: int) -> None:
    """Write lines of 20 to 300 random words, with a total of `size` bytes."""
    random = np.random.default_rng(0)
    words = np.array(["".join(map(chr, random.integers(97, 123, n % 9 + 1))) for n in range(5000)])
    with open(file, "w") as stream:
        while stream.tell() < size:
            lines = (" ".join(random.choice(words, random.integers(20, 301))) for _ in range(2000))
            stream.write("\n".join(lines) + "\n")


def made(folder: Path, megabytes: int, workers: int) -> tuple[Corpus, float | None]:
    """Return the corpus and the time in seconds to prepare it, or None if it already existed."""
    out = folder / f"tokens-{megabytes}"
    if is_prepared(out) and (out / "manifest.json").exists():
        return open_corpus(out), None
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "text.txt"
    write_text(file, megabytes * 10**6 // 2)
    config = PrepareConfig(data=(str(file),), documents="lines", tokenizer="byte", shard_mb=100)
    start = time.perf_counter()
    corpus = prepare(config, out, workers=workers)
    seconds = time.perf_counter() - start
    file.unlink()
    return corpus, seconds


def memory() -> dict[str, float]:
    """Return the resident memory of the process, with and without files, in 10^6 bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    said = dict(line.split(":", 1) for line in lines)
    return {name: int(said[name].split()[0]) * 1024 / 1e6 for name in ("VmRSS", "RssAnon")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--megabytes", type=int, default=500)
    add("--folder", type=Path, default=Path("/tmp/transformer_jax_data"))
    add("--workers", type=int, default=2)
    add("--context", type=int, default=512)
    add("--batch-size", type=int, default=16)
    add("--d-model", type=int, default=64)
    add("--layers", type=int, default=2)
    add("--steps", type=int, default=20)
    add("--rounds", type=int, default=5)
    add("--slow-ms", type=float, default=0.0, help="added to each row, as of storage far away")
    add("--documents", action="store_true", help="packed documents in the place of windows")
    given = parser.parse_args()
    corpus, seconds = made(given.folder, given.megabytes, given.workers)
    found: dict[str, object] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    size = corpus.train.tokens * corpus.train.dtype.itemsize / 1e6
    found["corpus"] = size
    if seconds is not None:
        found["prepared, MB of text a second"] = size / 2 / seconds
    model = ModelConfig(
        d_model=given.d_model, num_layers=given.layers, num_heads=max(given.d_model // 64, 1),
        d_ff=4 * given.d_model, max_len=given.context,
    )  # fmt: skip
    config = TrainConfig(
        model=model, data=str(corpus.path), batch_size=given.batch_size,
        task=LanguageTask(documents="prepared" if given.documents else None),
    )  # fmt: skip
    found["before"] = memory()
    start = time.perf_counter()
    task = load_task(config)
    assert isinstance(task, PreparedText)
    found["opened, with every hash, seconds"] = time.perf_counter() - start
    found["opened"] = memory()
    optimizer = make_optimizer(task.config)
    step = make_train_step(batch_loss(task.config.model), optimizer, task.prepare)
    state = init_state(task.config.model, optimizer, np.uint32(0))
    one = task.inputs(0)
    state, metrics = step(state, one)
    jax.device_get(metrics)
    found["first step"] = memory()
    if given.slow_ms:
        slow_down(given.slow_ms / 1e3)
    reads = {
        "one batch": lambda n: one,
        "when asked for": lambda n: jax.device_put(task.inputs(n, 0, 1)),
        "ahead": task.inputs,
    }
    times: dict[str, list[float]] = {name: [] for name in reads}
    waits: dict[str, list[float]] = {name: [] for name in reads}
    for begin in range(0, given.rounds * given.steps, given.steps):
        for name, read in reads.items():
            task.inputs(begin)  # prefetch while the previous round ends
            time.sleep(0.2)
            pending, waited, start = None, 0.0, time.perf_counter()
            for number in range(begin + 1, begin + 1 + given.steps):
                asked = time.perf_counter()
                batch = read(number)
                waited += time.perf_counter() - asked
                state, metrics = step(state, batch)
                if pending is not None:
                    jax.device_get(pending)
                pending = metrics
            jax.device_get(pending)
            times[name].append((time.perf_counter() - start) / given.steps)
            waits[name].append(waited / given.steps)
    for name in reads:
        median, wait = statistics.median(times[name]), statistics.median(waits[name])
        found[name] = {
            "step, ms": 1e3 * median,
            "spread, ms": [1e3 * min(times[name]), 1e3 * max(times[name])],
            "waiting, ms": 1e3 * wait,
            "waiting, share": wait / median,
        }
    found["trained"] = memory()
    if not given.slow_ms:
        found |= whole_epoch(task, size, given.batch_size)
    print(json.dumps(found, indent=1))


def slow_down(seconds: float) -> None:
    """Delay every read of tokens, to simulate remote storage."""
    real = Part.read

    def read(part: Part, start: int, into: np.ndarray) -> None:
        time.sleep(seconds)
        real(part, start, into)

    Part.read = read  # type: ignore[method-assign]


def whole_epoch(task: PreparedText, size: float, batch_size: int) -> dict[str, object]:
    """Read every row of the training part once, and return the time in seconds."""
    start = time.perf_counter()
    steps = len(task.rows[0]) // batch_size
    for number in range(steps):
        task.inputs(number)
    taken = time.perf_counter() - start
    epoch = {"steps": steps, "ms a step": 1e3 * taken / steps, "MB a second": size / taken}
    return {"an epoch read without training": epoch, "every row read": memory()}


if __name__ == "__main__":
    main()
