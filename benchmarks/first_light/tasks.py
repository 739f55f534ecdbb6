"""Work of the processes of each step. Each process prints its results for the parent.

python -m benchmarks.first_light.tasks goals causal-16k-h128-s8192 forward
"""

from __future__ import annotations

import csv
import ctypes
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import attention, contenders, decode, linear_attention, specs, timing, train_gpu
from benchmarks.contenders import FA3, OURS
from benchmarks.first_light import rehearsal
from benchmarks.first_light.checks import report
from benchmarks.goals import UNORDERED, cells
from benchmarks.specs import AttentionCase, DecodeCase, Direction
from benchmarks.timing import Contender, of_jax
from transformer_jax import training
from transformer_jax.kernels import Target, target

FUSED = ("jax.nn cudnn", "torch cudnn", "tokamax", "jax-linear-attention", FA3)
ROUNDS, SECONDS = 15, 3.0  # of a cell
CARD = "name", "driver_version", "memory.total", "clocks.sm", "clocks.mem", "power.limit"


def machine(rehearsed: bool) -> None:
    """Report the machine, its tools, and the rates of a product, a read and a copy."""
    if not rehearsed and jax.default_backend() == "cpu":
        raise SystemExit("no accelerator; the backend is cpu: try `--rehearse`")
    found = timing.environment()
    tools = {name: shutil.which(name) or "not found" for name in ("ncu", "compute-sanitizer")}
    card = {}
    if shutil.which("nvidia-smi"):
        asked = "nvidia-smi", f"--query-gpu={','.join(CARD)}", "--format=csv,noheader"
        said = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False)
        card = dict(zip(CARD, said.stdout.partition("\n")[0].split(", "), strict=False))
    known = {name: version for name, version in found["packages"].items() if version}
    report({name: found[name] for name in ("time", "device", "commit")} | card | tools | known)
    sizes = (256, 2**16, 2**16) if rehearsed else (8192, 2**30, 2**30)
    rates = timing.matmul_rate, timing.read_rate, timing.copy_rate
    dtype = "float32" if rehearsed else "bfloat16"
    matmul, read, copy = (
        partial(rate, dtype)(size) if rate is timing.matmul_rate else rate(size)
        for rate, size in zip(rates, sizes, strict=True)
    )
    report({"matmul_flops_per_s": matmul, "read_bytes_per_s": read, "copy_bytes_per_s": copy})


def case_of(name: str, rehearsed: bool) -> AttentionCase:
    """Return the case called `name`, or a small one with the same mask and options."""
    [case] = [case for case in specs.attention_cases("gpu") if case.name == name]
    return rehearsal.shrunk(case) if rehearsed else case


def goals(rehearsed: bool, name: str, direction: Direction) -> None:
    """Report the times of our kernels and of peers in one cell."""
    settings = ["--ours", "pallas", "--repeats", str(ROUNDS), "--seconds", str(SECONDS)]
    if rehearsed:
        settings[2:] = ["--repeats", "1", "--seconds", "0"]
    options = attention._options(settings)
    options.wait_each = rehearsed
    wanted = cells().get((name, direction), set()) | {OURS}
    if "causal-16k" in name or "window" in name or "documents" in name:
        wanted |= {*FUSED} | ({UNORDERED} if direction != "forward" else set())
    if rehearsed:
        wanted = {OURS, "jax.nn", "torch"}
    case = case_of(name, rehearsed)
    with rehearsal.kernels(rehearsed):
        report(attention.measure(case, direction, options, time.perf_counter, wanted))


PRODUCTS = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|^dot", re.IGNORECASE)
ATTENTION = re.compile(r"pallas|mosaic|ffi_call", re.IGNORECASE)
KERNELS = 40  # number of rows in the table of kernels


def profile(rehearsed: bool) -> None:
    """Report the time of each kernel in a training step of two micro-batches of GPT-2 124M."""
    case = train_gpu.QUICK[0] if rehearsed else train_gpu.CASES[0]
    # By default, "pallas" is chosen only on chips on which it has been measured.
    chosen = "pallas" if isinstance(target(), Target) else None
    case = replace(case, micro_batches=2, model=replace(case.model, implementation=chosen))
    text = jnp.asarray(train_gpu.tokens(case))
    batch = training.Batch(text[..., :-1], text[..., 1:])
    optimizer = training.make_optimizer(train_gpu.RECIPE)
    state = training.init_state(case.model, optimizer, 0)
    loss = training.batch_loss(case.model)
    step = training.make_train_step(loss, optimizer).lower(state, batch).compile()
    places = dict(re.findall(r"%?([\w.-]+) = .*?op_name=\"([^\"]*)\"", step.as_text()))
    steps, times = 3, []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(2 + 2 * steps):  # warm, timed, and traced
            if index == 2 + steps:
                jax.profiler.start_trace(folder)
            begun = time.perf_counter()
            state, metrics = step(state, batch)
            float(metrics.loss)
            times.append(time.perf_counter() - begun)
        jax.profiler.stop_trace()
        [path] = Path(folder).glob("**/*.xplane.pb")
        rows = list(kernels(jax.profiler.ProfileData.from_file(str(path)), places, steps))
    wall = 1e3 * float(np.median(times[2 : 2 + steps]))
    rows.sort(key=lambda row: -row["ms"])
    report({"kind": "the whole step", "ms": wall, "kernels": sum(row["count"] for row in rows)})
    for kind in ("products", "attention", "other"):
        own = [row for row in rows if row["kind"] == kind]
        total = sum(row["ms"] for row in own)
        report({"kind": kind, "ms": total, "kernels": sum(row["count"] for row in own)})
    for row in rows[:KERNELS]:
        report(row)


def kernels(data: Any, places: dict[str, str], steps: int) -> Iterable[dict[str, Any]]:
    """Yield the time and number per step of all kernels with the same operation of the program.

    `places` contains the function of the source for each operation.
    """
    lines = [(plane.name, line) for plane in data.planes for line in plane.lines]
    streams = [x for plane, x in lines if "/device:GPU" in plane and x.name.startswith("Stream")]
    found: dict[tuple[str, str], list[float]] = {}
    for line in streams or [line for plane, line in lines if plane == "/host:CPU"]:
        for event in line.events:
            operation = str(dict(event.stats).get("hlo_op", ""))
            if streams or (operation and not operation.startswith(("while", "cond", "call"))):
                found.setdefault((operation, event.name), []).append(event.duration_ns)
    for (operation, name), times in found.items():
        place = places.get(operation, "")
        last = place.rpartition("/")[2]
        kind = "products" if PRODUCTS.search(name) or PRODUCTS.search(operation) else "other"
        kind = "attention" if ATTENTION.search(f"{name} {operation} {last}") else kind
        yield {
            "kernel": name[:48],
            "kind": kind,
            "ms": sum(times) / steps / 1e6,
            "count": len(times) / steps,
            "where": re.sub(r"^.*closed_call/", "", place)[-70:],
        }


DECODED = {
    "GPT-2 124M": DecodeCase(
        name="GPT-2 124M", model=train_gpu.GPT2, batch=1, prompt=128, new=256, capacity=512
    ),
    "Llama 1.3B": DecodeCase(
        name="Llama 1.3B", model=train_gpu.LLAMA, batch=1, prompt=128, new=128, capacity=512
    ),
}


def decoding(rehearsed: bool, name: str) -> None:
    """Report tokens per second of one row, and the fraction of the time of one read."""
    case = DECODED[name]
    if rehearsed:
        small = replace(case.model, d_model=64, num_layers=1, num_heads=2, d_ff=128, vocab_size=97)
        case = replace(case, model=small, prompt=16, new=4)
    params = decode.parameters(case)
    peer = decode.ours(case, params)
    embedding = params["embed"]["tokens"].nbytes
    size = peer.token_bytes - (0 if case.model.tie_embeddings else embedding)
    generations = [
        Contender(title, partial(peer.generate, new))
        for title, new in ((OURS, case.new), (OURS + decode.FIRST, 1))
    ]
    reads = timing.reads(max(size, 2**20))
    limits = dict(rounds=5, seconds=0.0 if rehearsed else 8.0)
    taken = timing.interleave([*generations, *reads], **limits)
    token = float(np.median(decode._per_token(taken, OURS, case.new)))
    read = timing.fastest(taken[r.name] for r in reads).median
    report({
        "model": name,
        "tokens_per_s": 1 / token,
        "MB_read_per_token": size / 1e6,
        "fraction_of_memory_rate": read / token,
        "first_token_ms": 1e3 * taken[OURS + decode.FIRST].median,
    })  # fmt: skip


COUNTERS = {
    "ns": "gpu__time_duration.sum",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "special": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "issue": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "registers": "launch__registers_per_thread",
}
"""Counters that ncu reports, in nanoseconds and in percent of each unit's peak."""
LAUNCHES = 24  # of a call, including small kernels around ours
LONGEST = 3  # number of reported kernels
COUNTED: tuple[tuple[str, Direction], ...] = (
    ("pallas", "forward"), ("pallas", "backward"), ("pallas_unordered", "backward"),
)  # fmt: skip


def counters(rehearsed: bool, name: str) -> None:
    """Report the counters of the longest kernels in one call of each pass, with ncu."""
    own = sys.executable, "-m", "benchmarks.first_light.tasks"
    if rehearsed:
        own = (*own, "--rehearse")
    attend_it = *own, "attend", name
    if shutil.which("ncu") is None:
        subprocess.run(attend_it, check=True, timeout=300)  # rehearses the program
        return report({"absent": "ncu not found; the program ran without it"})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counters.csv"
        ncu = (
            "ncu", "--clock-control", "none", "--profile-from-start", "off", "--launch-count",
            str(LAUNCHES * len(COUNTED)), "--metrics", ",".join(COUNTERS.values()),
            "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(path),
        )  # fmt: skip
        subprocess.run((*ncu, *attend_it), check=True)
        found = launches(path.read_text(errors="replace").splitlines())
    if not found:
        raise SystemExit("ncu wrote no counters")
    for launch in sorted(found, key=lambda x: -(x["ns"] or 0))[: LONGEST * len(COUNTED)]:
        report({"case": name} | launch)


def launches(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Parse ncu's "raw" page in CSV format: counter names, units, and one row per launch.

    Messages from ncu begin with "==", and numbers may have thousands separators.
    """
    rows = list(csv.reader(line for line in lines if line.startswith('"')))
    if len(rows) < 3:
        return []
    header, _, *values = rows
    named = (dict(zip(header, row, strict=False)) for row in values)
    return [
        {"kernel": row.get("Kernel Name", "?")[:48]}
        | {short: _number(row.get(name)) for short, name in COUNTERS.items()}
        for row in named
    ]


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text.replace(",", ""))
    except ValueError:  # n/a
        return None


def attend(rehearsed: bool, name: str) -> None:
    """Call each pass twice, and let a waiting profiler record the second call."""
    case = case_of(name, rehearsed)
    with rehearsal.kernels(rehearsed):
        for implementation, direction in COUNTED:
            chosen = rehearsal.STANDS_IN[implementation] if rehearsed else implementation
            options = attention._options(["--ours", chosen])
            call = contenders.builders(case, direction, options)[OURS]()
            call()
            _profiler("Start", rehearsed)
            call()
            _profiler("Stop", rehearsed)


def _profiler(what: str, rehearsed: bool) -> None:
    if rehearsed:
        return
    driver = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    steps = (
        ("cuInit", 0),
        ("cuDeviceGet", ctypes.byref(device), 0),
        ("cuDevicePrimaryCtxRetain", ctypes.byref(context), device),  # the context of XLA
        ("cuCtxSetCurrent", context),
        (f"cuProfiler{what}",),
    )
    for name, *arguments in steps:
        if status := getattr(driver, name)(*arguments):
            raise RuntimeError(f"{name} returned {status}")


def in_tiles(x: jax.Array, weights: jax.Array, tile: int) -> jax.Array:  # [R, D], [D, F] -> [R, F]
    """Return x W as one product per `tile` rows, so that a row has the same bits among others."""
    padded = jnp.pad(x, [(0, -len(x) % tile), (0, 0)])
    found = jax.lax.map(lambda rows: rows @ weights, padded.reshape(-1, tile, x.shape[1]))
    return found.reshape(len(padded), -1)[: len(x)]


def products(rehearsed: bool) -> None:
    """Report the cost of products in tiles of rows, and the bits of a row among others."""
    D, F, counts = (64, 96, (1, 40)) if rehearsed else (2048, 8192, (1, 16, 300, 4096))
    key = jax.random.key(0)
    x = jax.random.normal(key, (max(counts), D), "bfloat16")
    weights = jax.random.normal(jax.random.fold_in(key, 1), (D, F), "bfloat16")
    ways: dict[str, Callable[..., jax.Array]] = {"usual": jnp.matmul}
    ways |= {f"tiles of {tile}": partial(in_tiles, tile=tile) for tile in (64, 256)}
    programs = {name: jax.jit(way) for name, way in ways.items()}
    alone = {name: np.asarray(run(x[:1], weights)[0]) for name, run in programs.items()}
    for rows in counts:
        begin = {name: partial(run, x[:rows], weights) for name, run in programs.items()}
        same = {
            name: int((np.asarray(run()[0]) != alone[name]).sum()) for name, run in begin.items()
        }
        contenders_ = [of_jax(name, run) for name, run in begin.items()]
        taken = timing.interleave(contenders_, rounds=3 if rehearsed else 9, seconds=2.0)
        ms = {f"{name}, ms": 1e3 * taken[name].median for name in ways}
        report({"rows": rows} | ms | {f"{name}, differ": count for name, count in same.items()})


def linear(rehearsed: bool) -> None:
    """Report the time of linear attention in chunks of 64, in plain XLA."""
    lengths = (128,) if rehearsed else (4096, 16384)
    heads = (1, 2) if rehearsed else (linear_attention.KEY_HEADS, linear_attention.VALUE_HEADS)
    for direction in linear_attention.DIRECTIONS:
        for T in lengths:
            arrays = linear_attention.inputs(T, *heads, per_key=False)
            run = partial(linear_attention.program(64, direction), *arrays)
            taken = timing.interleave([of_jax(direction, run)], rounds=3 if rehearsed else 9)
            report({"direction": direction, "T": T, "ms": 1e3 * taken[direction].median})


TASKS: dict[str, Callable[..., None]] = {
    "machine": machine, "goals": goals, "profile": profile, "decoding": decoding,
    "counters": counters, "attend": attend, "products": products, "linear": linear,
}  # fmt: skip


def main() -> None:
    rehearsed = "--rehearse" in sys.argv
    name, *arguments = (x for x in sys.argv[1:] if x != "--rehearse")
    if not rehearsed:
        timing.prepare()
    TASKS[name](rehearsed, *arguments)


if __name__ == "__main__":
    main()
