"""How fast is our attention beside its peers, and how does its memory grow?

    python -m benchmarks.attention --quick
    python -m benchmarks.attention --out benchmarks/results/attention_cpu.json

Ours by name and as `None` chooses, against torch's scaled_dot_product_attention, jax.nn's and
flax's; forward, and forward with backward. Everyone gets inputs in the layout he likes best and the
strongest way he has to say the mask. Who is absent, cannot express a case, or would not fit is
named with the reason and never counted.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from benchmarks import specs, timing
from benchmarks.specs import AttentionCase
from benchmarks.timing import Contender
from transformer_jax import dot_product_attention, explain_attention

OURS = "ours"
PEERS = ("torch", "jax.nn", "jax.nn cudnn", "flax", "torch flash", "torch cudnn", "torch flex",
         "tokamax", "jax pallas")  # fmt: skip
DIRECTIONS = ("forward", "forward+backward")
QUESTION = "attention: seconds per call of ours and its peers"


class Absent(Exception):
    """Why a contender does not take part in a case."""


def main(argv: list[str] | None = None) -> None:
    options = _options(argv)
    start = time.perf_counter()
    clock = timing.prepare(one_core=options.one_core)
    before = timing.environment()
    print(timing.headline(before))
    selected = _selected(options, before["platform"])
    if not selected:
        raise SystemExit(f"no case's name contains {options.only!r}")
    results: dict[str, Any] = {"limits": {}, "cases": [], "failed": {}}

    def limits(when: str) -> float:
        found = results["limits"][when] = timing.limits(selected[0].dtype, clock)
        matmul, copy = found["matmul_flops_per_s"], found["copy_bytes_per_s"]
        print(
            f"{when}: one {selected[0].dtype} matmul {matmul / 1e9:.0f} GFLOP/s, "
            f"one copy {copy / 1e9:.1f} GB/s",
            flush=True,
        )
        return matmul

    limit = limits("before")

    def write(**more: Any) -> None:
        results.update(more)
        if options.out is not None:
            timing.write(options.out, QUESTION, before, results)

    for case, direction in itertools.product(selected, DIRECTIONS):
        try:
            if time.perf_counter() - start > 60 * options.minutes:
                raise TimeoutError(f"not begun: {options.minutes:g} minutes are over")
            found = measure(case, direction, options, clock)
        except Exception as error:  # which must not cost the others their results
            results["failed"][f"{case.name} {direction}"] = timing.brief(error)
            print(f"\n{case.name} {direction}: {timing.brief(error)}", flush=True)
        else:
            results["cases"].append(found)
            print(_line(found, limit), flush=True)
        write()  # each time: a run may be cut short
    print(flush=True)
    limits("after")
    means = geometric_means(results["cases"])
    print(_means_table(means))
    memory = [] if options.skip_memory else list(memory_growth(options))
    if memory:
        print(_memory_table(memory))
    write(geometric_means=means, memory=memory)
    if options.out is not None and results["cases"]:
        plot(results["cases"], limit, before["device"], options.out.with_suffix(".png"))
    if results["failed"]:
        raise SystemExit(f"not measured: {', '.join(results['failed'])}")


def measure(
    case: AttentionCase, direction: str, options: argparse.Namespace, clock: Callable[[], float]
) -> dict[str, Any]:
    """One case in one direction: timings, ratios to ours, largest difference from ours."""
    contenders, differences, absent = [], {}, {}
    reference: list[np.ndarray] = []
    for name, build in builders(case, direction, options).items():
        try:
            if name in options.without:
                raise Absent("left out")
            call = build()
            outputs = [np.asarray(leaf, np.float32) for leaf in call()]
            reference = reference or outputs
            differences[name] = _difference(reference, outputs)
            contenders.append(Contender(name, call))
        except Absent as reason:
            absent[name] = str(reason)
        except Exception as error:
            if name == OURS:
                raise
            absent[name] = timing.brief(error)  # whatever one of them lacks
    taken = timing.interleave(
        contenders, rounds=options.repeats, seconds=options.seconds, clock=clock
    )
    return {
        "case": case.name,
        "direction": direction,
        "flops": case.flops(direction != "forward"),
        "timings": {name: t.summary() for name, t in taken.items()},
        "speedup_of_ours": {
            name: timing.speedup(taken[OURS], t) for name, t in taken.items() if name != OURS
        },
        "difference": differences,
        "absent": absent,
    }


def builders(
    case: AttentionCase, direction: str, options: argparse.Namespace
) -> dict[str, Callable[[], Callable[[], Any]]]:
    """For each contender what builds its call, or raises Absent."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.eval_shape(case.inputs)]
    explained = explain_attention(*shapes, mask=case.mask())

    def jax_call(attend: Callable[..., Any], *arguments: Any, runs: str) -> Callable[[], Any]:
        return partial(_jax_call, case, direction, options, partial(attend, case, *arguments), runs)

    calls = {OURS: jax_call(_ours, None, runs=explained.chosen)}
    for name, reason in explained.items():
        same = name == "pallas_unordered" and direction == "forward"  # as pallas: another backward
        if reason is None and name != explained.chosen and not same:
            calls[f"{OURS} {name}"] = jax_call(_ours, name, runs=name)
    calls["torch"] = partial(_torch_call, case, direction, options)
    calls["jax.nn"] = jax_call(_jax_nn, "xla", runs="xla")
    if jax.default_backend() in ("gpu", "cuda"):
        calls["jax.nn cudnn"] = jax_call(_jax_nn, "cudnn", runs="cudnn")
        for name in ("flash", "cudnn", "flex"):
            calls[f"torch {name}"] = partial(_torch_call, case, direction, options, name)
        calls["tokamax"] = jax_call(_tokamax, runs="tokamax")
        calls["jax pallas"] = jax_call(_jax_pallas, runs="pallas")
    calls["flax"] = jax_call(_flax, runs="xla")
    return calls


def _ours(case: AttentionCase, name: str | None) -> Callable[..., jax.Array]:
    return partial(dot_product_attention, mask=case.mask(), implementation=name)


def _jax_nn(case: AttentionCase, implementation: str) -> Callable[..., jax.Array]:
    mask = None
    arguments: dict[str, Any] = dict(is_causal=case.causal, implementation=implementation)
    if case.window is not None:
        arguments["local_window_size"] = (case.window - 1, 0 if case.causal else case.window - 1)
    if case.documents is not None:
        documents = replace(case, causal=False, window=None, padded=False)
        mask = jnp.asarray(documents.dense_mask()[:, None])
    if case.padded:
        arguments["key_value_seq_lengths"] = case.valid().sum(axis=1)
    attend = partial(jax.nn.dot_product_attention, **arguments)
    # an argument: as a constant of the program, a large mask would be folded by the compiler
    return Partial(lambda mask, *inputs: attend(*inputs, mask=mask), mask)


def _flax(case: AttentionCase) -> Callable[..., jax.Array]:
    import flax.linen as nn

    if case.heads != case.kv_heads:
        raise Absent("flax's function has no grouped heads")
    dense = case.dense_mask()

    def attend(query, key, value):
        mask = None if dense is None else jnp.asarray(dense[:, None])
        if mask is None and case.causal:
            mask = jnp.tril(jnp.ones((1, 1, case.queries, case.keys), bool))
        return nn.dot_product_attention(query, key, value, mask=mask, deterministic=True)

    return attend


def _tokamax(case: AttentionCase) -> Callable[..., jax.Array]:
    try:
        import tokamax
    except ImportError as error:
        raise Absent("tokamax is not installed") from error
    arguments: dict[str, Any] = dict(is_causal=case.causal)
    if case.window is not None:
        arguments["local_window_size"] = (case.window - 1, 0 if case.causal else case.window - 1)
    if case.documents is not None or case.padded:
        raise Absent("documents and padding are not translated")
    return partial(tokamax.dot_product_attention, **arguments)


def _jax_pallas(case: AttentionCase) -> Callable[..., jax.Array]:
    """jax's own Pallas-Triton kernel; its Mosaic kernel has no causal backward."""
    try:
        from jax.experimental.pallas.ops.gpu import attention
    except ImportError as error:
        raise Absent("jax has no Pallas kernel here") from error
    if case.heads != case.kv_heads or case.window is not None or case.padded:
        raise Absent("no grouped heads, windows or lengths")
    ids = None if case.documents is None else jnp.asarray(case.document_ids())
    scale = 1 / math.sqrt(case.head_dim)
    return lambda q, k, v: attention.mha(q, k, v, ids, sm_scale=scale, causal=case.causal)


def _jax_call(
    case: AttentionCase,
    direction: str,
    options: argparse.Namespace,
    build: Callable[[], Callable[..., jax.Array]],
    runs: str,
) -> Callable[[], Any]:
    if runs == "xla":
        # forward the scores and their exponentials, backward their gradients too
        needed = case.score_bytes() * (2 if direction == "forward" else 4)
        if needed > options.memory * 2**30:
            raise Absent(f"materialised scores need {needed / 2**30:.1f} GiB")
    attend = build()
    if not isinstance(attend, Partial):  # whose arguments are arrays
        attend = Partial(attend)
    query, key, value = case.inputs()
    shape = (*query.shape[:-1], case.value_dim)
    cotangent = jax.random.normal(jax.random.key(3), shape, query.dtype)

    @jax.jit
    def run(attend, *inputs):
        return (attend if direction == "forward" else _with_gradients(attend))(*inputs)

    inputs = (attend, query, key, value, *(() if direction == "forward" else (cotangent,)))

    def call():
        return jax.block_until_ready(_leaves(run(*inputs)))

    return call


def _with_gradients(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    def both(query, key, value, cotangent):
        out, pull = jax.vjp(attend, query, key, value)
        return (out, *pull(cotangent.astype(out.dtype)))

    return both


def _leaves(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _torch_call(
    case: AttentionCase, direction: str, options: argparse.Namespace, name: str = ""
) -> Callable[[], Any]:
    """torch in its own layout [B, N, T, H]; the transposition is not timed.

    `name` asks for one of its kernels ("flash", "cudnn", "flex"), else torch chooses.
    """
    try:
        import torch
    except ImportError as error:
        raise Absent("torch is not installed") from error
    device = "cpu"
    if jax.default_backend() != "cpu":
        if not torch.cuda.is_available():
            raise Absent("this torch has no GPU")
        device = "cuda"
    else:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    dtype = getattr(torch, case.dtype)
    arguments: dict[str, Any] = dict(is_causal=case.causal, enable_gqa=case.heads != case.kv_heads)
    if case.is_dense and name == "flash":
        raise Absent("takes no mask as an array")
    if case.is_dense and name != "flex":
        needed = 3 * case.queries * case.keys  # while it is made
        if needed > options.memory * 2**30:
            raise Absent(f"the mask as an array needs {needed / 2**30:.1f} GiB")
        mask = torch.from_numpy(case.dense_mask()[:, None]).to(device)
        arguments.update(attn_mask=mask, is_causal=False)

    def tensor(x: jax.Array) -> Any:
        given = torch.from_numpy(np.array(x, np.float32)).to(device=device, dtype=dtype)
        return given.transpose(1, 2).contiguous()

    query, key, value = map(tensor, case.inputs())
    shape = (case.batch, case.queries, case.heads, case.value_dim)
    cotangent = tensor(jax.random.normal(jax.random.key(3), shape, case.dtype))
    attend = partial(torch.nn.functional.scaled_dot_product_attention, **arguments)
    if name == "flex":
        attend = _flex(torch, case, device)
    elif name:
        attend = _one_kernel(torch, attend, name)

    def call():
        if direction == "forward":
            with torch.no_grad():
                results = (attend(query, key, value),)
        else:
            inputs = [x.requires_grad_() for x in (query, key, value)]
            out = attend(*inputs)
            results = (out.detach(), *torch.autograd.grad(out, inputs, cotangent))
        if device == "cuda":
            torch.cuda.synchronize()
        return _Torch(results)

    return call


def _one_kernel(torch: Any, attend: Callable[..., Any], name: str) -> Callable[..., Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[name]

    def only(*inputs):
        with sdpa_kernel(backend):
            return attend(*inputs)

    return only


def _flex(torch: Any, case: AttentionCase, device: str) -> Callable[..., Any]:
    """FlexAttention, compiled for this case alone, with its mask as blocks."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # or the eighth case would run uncompiled
    ids = valid = None
    if case.documents is not None:
        ids = torch.from_numpy(case.document_ids()).to(device)
    if case.padded:
        valid = torch.from_numpy(case.valid()).to(device)

    def sees(b, h, q, k):
        result = q >= k if case.causal else q == q
        if case.window is not None:
            # no differences: of all pairs, these would be integers
            result = result & (q - case.window < k) & (q + case.window > k)
        if ids is not None:
            result = result & (ids[b, q] == ids[b, k])
        return result if valid is None else result & valid[b, k]

    blocks = create_block_mask(sees, case.batch, None, case.queries, case.keys, device=device)
    grouped = case.heads != case.kv_heads
    compiled = torch.compile(flex_attention, dynamic=False)
    return partial(compiled, block_mask=blocks, enable_gqa=grouped)


class _Torch(tuple):
    """torch's results, which become [B, T, N, H] arrays only when looked at."""

    def __iter__(self) -> Iterator[np.ndarray]:
        return (x.float().cpu().numpy().swapaxes(1, 2) for x in super().__iter__())


def _difference(ours: list[np.ndarray], other: list[np.ndarray]) -> float | None:
    """Largest of |other - ours| / max |ours| over output and gradients; None where not finite."""
    with np.errstate(invalid="ignore"):
        pairs = zip(ours, other, strict=True)
        found = [float(np.abs(mine - x).max() / np.abs(mine).max()) for mine, x in pairs]
    return max(found) if all(map(math.isfinite, found)) else None


def geometric_means(cases: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per direction and contender: the mean speedup of ours, the worst cell, how many cells."""
    means: dict[str, dict[str, Any]] = {}
    for direction in DIRECTIONS:
        ratios: dict[str, dict[str, float]] = {}
        for found in cases:
            if found["direction"] != direction:
                continue
            for name, ratio in found["speedup_of_ours"].items():
                ratios.setdefault(name, {})[found["case"]] = ratio
            peers = [r for n, r in found["speedup_of_ours"].items() if n in PEERS]
            if peers:
                ratios.setdefault("best peer", {})[found["case"]] = min(peers)
        means[direction] = {
            name: {
                "mean": timing.geometric_mean(cells.values()),
                "worst": min(cells.values()),
                "worst_case": min(cells, key=cells.__getitem__),
                "cells": len(cells),
            }
            for name, cells in ratios.items()
        }
    return means


def memory_growth(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Temporary bytes of forward with backward as S doubles, from the compiler: nothing is run."""
    base = specs.attention_cases("memory")[0]
    lengths = (512, 1024, 2048) if options.quick else (2048, 4096, 8192, 16384)
    for label in ("window256", "causal"):
        window = 256 if label == "window256" else None
        cases = [replace(base, queries=n, keys=n, window=window) for n in lengths]
        attends = {
            f"{OURS} blockwise": lambda case: _ours(case, "blockwise"),
            f"{OURS} xla": lambda case: _ours(case, "xla"),
            "jax.nn": lambda case: _jax_nn(case, "xla"),
        }
        for name, attend in attends.items():
            sizes = [_temporary_bytes(case, attend(case)) for case in cases]
            steps = itertools.pairwise(sizes)
            yield {
                "mask": label,
                "name": name,
                "lengths": list(lengths),
                "bytes": sizes,
                "slopes": [math.log2(after / before) for before, after in steps],
            }


def _temporary_bytes(case: AttentionCase, attend: Callable[..., jax.Array]) -> int:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.eval_shape(case.inputs)]
    compiled = jax.jit(_with_gradients(attend)).lower(*shapes, shapes[0]).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def _line(found: dict[str, Any], limit: float) -> str:
    timings, ratios = found["timings"], found["speedup_of_ours"]
    rate = found["flops"] / timings[OURS]["median_s"]
    lines = [
        f"\n{found['case']} {found['direction']}: {rate / 1e9:.0f} GFLOP/s, "
        f"{rate / limit:.2f} of a matmul"
    ]
    rows = []
    for name, taken in timings.items():
        low, high = taken["quartiles_s"]
        difference = found["difference"][name]
        rows.append(
            (
                name,
                f"{1e3 * taken['median_s']:.2f}",
                f"{1e3 * low:.2f}-{1e3 * high:.2f}",
                f"{ratios[name]:.2f}x" if name in ratios else "",
                "not finite" if difference is None else f"{difference:.0e}",
            )
        )
    lines.append(timing.table(("", "ms", "middle half", "ours is", "differs"), rows))
    lines += [f"{name}: {reason}" for name, reason in found["absent"].items()]
    return "\n".join(lines)


def _means_table(means: dict[str, dict[str, Any]]) -> str:
    rows = [
        (
            name,
            direction,
            f"{found['mean']:.2f}x",
            f"{found['worst']:.2f}x {found['worst_case']}",
            str(found["cells"]),
        )
        for direction, by_name in means.items()
        for name, found in by_name.items()
    ]
    return "\n" + timing.table(
        ("ours against", "direction", "geometric mean", "worst cell", "cells"), rows
    )


def _memory_table(memory: list[dict[str, Any]]) -> str:
    lengths = memory[0]["lengths"]
    rows = [
        (
            f"{found['mask']}, {found['name']}",
            *(f"{size / 2**20:.0f}" for size in found["bytes"]),
            " ".join(f"{slope:.2f}" for slope in found["slopes"]),
        )
        for found in memory
    ]
    header = ("temporaries, MiB, at S =", *map(str, lengths), "slope (1 is linear)")
    return "\n" + timing.table(header, rows)


def plot(cases: list[dict[str, Any]], limit: float, device: str, path: Path) -> None:
    """Each contender's rate as a part of a matmul's: a row for each case and direction."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for found in cases for name in found["timings"]))
    labels = [f"{found['case']}, {found['direction']}" for found in cases]
    figure = Figure(figsize=(9, 1.6 + 0.34 * len(cases)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes, ink = figure.add_subplot(), "#444444"
    colors = ("#e07b39", "#3b6fb6", "#5b9a5b", "#9566a8", "#b04a5a", "#7f7f7f")
    for index, name in enumerate(names):
        rates = {
            row: found["flops"] / found["timings"][name]["median_s"] / limit
            for row, found in enumerate(cases)
            if name in found["timings"]
        }
        axes.plot(
            list(rates.values()), list(rates), "osDv^P"[index // len(colors)],
            color=colors[index % len(colors)], ms=9 if name == OURS else 5, alpha=0.85, label=name,
        )  # fmt: skip
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("rate over the pairs that are seen, one matmul is 1", color=ink)
    axes.set_title(device, loc="left", color=ink, parse_math=False)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#bbbbbb")
    axes.tick_params(colors=ink)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, labelcolor=ink)
    figure.savefig(path)


def _selected(options: argparse.Namespace, platform: str) -> list[AttentionCase]:
    tag = "quick" if options.quick else "cpu" if platform == "cpu" else "gpu"
    cases = [case for case in specs.attention_cases(tag) if options.only in case.name]
    if platform == "cpu":
        return cases
    return [replace(case, dtype="bfloat16") for case in cases]  # also the quick ones


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="a few short cases, to see that it runs")
    add("--only", default="", metavar="TEXT", help="cases whose name contains this")
    add("--repeats", type=int, default=None, help="rounds (20, or 3 with --quick)")
    add("--seconds", type=float, default=30.0, help="about the longest one case may take")
    add("--memory", type=float, default=8.0, metavar="GiB", help="for materialised scores")
    add("--without", nargs="+", default=[], metavar="NAME", help="contenders to leave out")
    add("--minutes", type=float, default=math.inf, help="begin no case after so many")
    add("--skip-memory", action="store_true", help="leave out the table of memory")
    add("--one-core", action="store_true", help=timing.ONE_CORE)
    add("--out", type=Path, default=None, help="JSON to write, and a PNG beside it")
    options = parser.parse_args(argv)
    if options.repeats is None:
        options.repeats = 3 if options.quick else 20
    return options


if __name__ == "__main__":
    main()
