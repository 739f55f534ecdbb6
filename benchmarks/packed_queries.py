"""Say what packing few queries of several heads saves on an H200, by compiled programs: none runs.

    python -m benchmarks.packed_queries --out benchmarks/results/packed_queries_h200.json

A call of few queries at the end of the keys, causal, and its gradient: as it is, and with each
head's queries in tiles of their own (`kernels/packed_queries.py`). Memory and the programs around
the kernels are those of `memory_analysis` and `kernel_program.py`; cycles of the longest program
are by what `kernel_model.py` has counted before, in `results/kernel_model_h200.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks import h200, kernel_model, kernel_program, timing
from benchmarks.kernel_cost import Cost, read
from benchmarks.specs import AttentionCase
from transformer_jax import Causal, dot_product_attention
from transformer_jax.kernels import Target, hopper, using
from transformer_jax.kernels.packed_queries import Rows

COUNTED = Path(__file__).parent / "results" / "kernel_model_h200.json"
HEADS = 32, 64
CALLS = {"pallas": ("forward", "dq", "dkdv"), "pallas_unordered": ("forward", "single_pass")}


def case_of(heads: int) -> AttentionCase:
    """Return sixteen queries a row over 8192 keys, of so many heads over 8 key heads."""
    return AttentionCase(
        name=f"few-queries-{heads}-8", batch=8, queries=16, keys=8192, heads=heads, kv_heads=8,
        head_dim=128, value_dim=128,
    )  # fmt: skip


def cycles(case: AttentionCase, cost: Cost, packs: bool) -> dict[str, float]:
    """Return the cycles of a kernel's longest program, and how many tiles all visit."""
    T, group, by_key = case.queries, case.heads // case.kv_heads, cost.kind in h200.BY_KEY
    block_q, block_k = cost.blocks["q"], cost.blocks["k"]
    at = jnp.arange(case.keys, dtype=jnp.int32)
    plan = Causal().block_plan(at[-T:], at, block_q=T, block_k=block_k)
    lists = plan.query_tiles() if by_key else plan.key_tiles()
    rows = Rows(T, group if packs else 1, block_q)
    shape = dict(queries=rows.tiles * block_q, heads=case.kv_heads if packs else case.heads)
    found = kernel_model.predict(
        AttentionCase(**vars(case) | shape), cost, rows.lists(lists, by_key)
    )
    names = "overlapped", "serial"
    return {name: found[name] for name in names} | {"tiles": found["tiles"]["seen"]}


def compiled(case: AttentionCase, name: str, packs: bool, device: Any) -> dict[str, Any]:
    """Compile a call with its gradient; return its temporaries and what stands around kernels."""
    place = jax.sharding.SingleDeviceSharding(device)
    q, k = (
        jax.ShapeDtypeStruct((case.batch, length, heads, 128), jnp.bfloat16, sharding=place)
        for length, heads in ((case.queries, case.heads), (case.keys, case.kv_heads))
    )
    at = jnp.arange(case.keys - case.queries, case.keys)

    def both(do: jax.Array, *inputs: jax.Array) -> Any:
        def attend(*inputs: jax.Array) -> jax.Array:
            return dot_product_attention(
                *inputs, mask=Causal(), q_positions=at, implementation=name
            )

        out, pull = jax.vjp(attend, *inputs)
        return out, pull(do)

    with (
        using(Target("hopper", chip=h200.KIND)),
        h200.context(),
        mock.patch.object(hopper, "PACKS", packs),
    ):
        jax.clear_caches()
        program = jax.jit(both).lower(q, q, k, k).compile()
    always = kernel_program.count(program.as_text())["always"]
    others = sum(n for kind, n in always.items() if kind != "mosaic")
    return {"temporaries": program.memory_analysis().temp_size_in_bytes, "other kernels": others}


def measure(device: Any) -> list[dict[str, Any]]:
    """Return a row for each number of heads and call, packed and not."""
    costs = {(c.kind, c.H, c.scores): c for c in read(COUNTED.read_text())}
    rows = []
    for heads in HEADS:
        for name, kinds in CALLS.items():
            for packs in (False, True):
                case = case_of(heads)
                by_kind = {k: cycles(case, costs[k, 128, "causal"], packs) for k in kinds}
                sums = {
                    bound: sum(one[bound] for one in by_kind.values())
                    for bound in ("overlapped", "serial", "tiles")
                }
                row = {"heads": heads, "call": name, "packed": packs, **sums, "kernels": by_kind}
                rows.append(row | compiled(case, name, packs, device))
    return rows


HEADER = (
    "heads", "call", "packed", "kernel", "tiles", "overlapped", "serial", "temporaries",
    "other kernels",
)  # fmt: skip


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table, those of each kernel under the sum."""
    lines = []
    for row in rows:
        name = str(row["heads"]), row["call"], "yes" if row["packed"] else "no"
        whole = f"{row['temporaries'] / 2**20:.1f} MiB", str(row["other kernels"])
        for kernel, one in {"all": row, **row["kernels"]}.items():
            numbers = (f"{one[x]:.0f}" for x in ("tiles", "overlapped", "serial"))
            lines.append((*name, kernel, *numbers, *(whole if kernel == "all" else ("", ""))))
    return timing.table(HEADER, lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write a JSON file, and a .txt beside it")
    given = parser.parse_args(argv)
    rows, made = measure(h200.device()), kernel_model.versions()
    text = ", ".join(f"{name} {value}" for name, value in made.items()) + f"\n\n{report(rows)}\n"
    print(text, end="")
    if given.out:
        given.out.write_text(kernel_model.lines_of({"versions": made, "programs": rows}))
        given.out.with_suffix(".txt").write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
