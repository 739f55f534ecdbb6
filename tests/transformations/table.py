"""Table of the JAX transformations of every public function, compared with the plain call.

    python -m tests.transformations                    # prints the table
    python -m tests.transformations --results cells.jsonl --only Decoder     # a part at a time
    python -m tests.transformations --results cells.jsonl --write docs/reference/transformations.md

A mark means that the transformed function returned the right numbers: for a derivative, those of
central differences along a random direction (for attention, of its formula in float64); otherwise
those of the plain call. Cells that are in the results file already are not run again. The page
omits rows with a missing cell.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.transformations.cases import Case, all_cases

NEAR = dict(rtol=2e-4, atol=2e-5)
STEP, FINE_STEP = np.float32(2**-6), np.float64(2**-12)  # steps of finite differences


def is_floating(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def same(found: Any, wanted: Any, rtol: float = 2e-4, atol: float = 2e-5) -> None:
    """Assert that two trees have the same types and close numbers; NaN never passes."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape, f"{x.dtype}{x.shape}, {y.dtype}{y.shape}"
        x, y = (np.asarray(jnp.asarray(a).astype(jnp.float32)) for a in (x, y))
        assert x.size and not np.isnan(y).any()
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol * max(1.0, _top(y)))


def _top(x: np.ndarray) -> float:
    finite = np.abs(x[np.isfinite(x)])
    return float(finite.max(initial=0))


def scalar(case: Case, function: Any = None) -> tuple[Callable[[Any], jax.Array], Any, Any]:
    """Return a function from floats to a random weighted sum of all results, its argument and a
    direction.

    The results are those of `function`, by default of the case.
    """
    function = case.function if function is None else function
    floats, others = case.arguments()
    rng = np.random.default_rng(5)
    draw = lambda x: rng.standard_normal(x.shape).astype(np.float32)  # noqa: E731
    out = jax.eval_shape(case.function, floats, others)
    weights = [draw(x) for x in jax.tree.leaves(out) if is_floating(x)]
    if not weights:
        raise TypeError("no result is floating")

    def f(floats: Any) -> jax.Array:
        results = [x for x in jax.tree.leaves(function(floats, others)) if is_floating(x)]
        numpy: Any = np if isinstance(results[0], np.ndarray) else jnp
        # an lse of -inf, of a row that sees nothing, has no derivative
        sums = [
            (w * numpy.where(numpy.isfinite(x), x, 0)).sum()
            for w, x in zip(weights, results, strict=True)
        ]
        return sum(sums[1:], sums[0])

    direction = jax.tree.map(draw, floats)
    norm = np.sqrt(sum(float((x**2).sum()) for x in jax.tree.leaves(direction)))
    return f, floats, jax.tree.map(lambda x: x / np.float32(norm), direction)


def along(f: Callable[[Any], Any], x: Any, v: Any, step: Any = STEP) -> Any:
    """Return the derivative along v by fourth-order central differences."""
    at = lambda a: jax.tree.map(lambda x, v: x + step * a * v, x, v)  # noqa: E731
    values = [
        jax.tree.map(lambda y: np.asarray(y, np.float64), f(at(np.float32(a))))
        for a in (-2, -1, 1, 2)
    ]
    return jax.tree.map(lambda a, b, c, d: (a - 8 * b + 8 * c - d) / (12 * float(step)), *values)


def slope(case: Case) -> float:
    """Return the derivative of `scalar` along its direction, by finite differences."""
    f, x, v = scalar(case)
    if case.definition is None:
        return float(along(jax.jit(f), x, v))
    exact, x, v = scalar(case, case.definition)
    x, v = (jax.tree.map(lambda a: np.asarray(a, np.float64), tree) for tree in (x, v))
    return float(along(exact, x, v, FINE_STEP))


def dot(x: Any, y: Any) -> float:
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    return sum(
        float((np.asarray(a, np.float64) * np.asarray(b, np.float64)).sum()) for a, b in pairs
    )


def near(found: float, wanted: float, scale: float) -> None:
    assert np.isfinite(found) and abs(found - wanted) <= 2e-3 * max(abs(wanted), scale), (
        f"{found}, by differences {wanted}"
    )


# One function per column


def jit(case: Case) -> None:
    arguments = case.arguments()
    same(jax.jit(case.function)(*arguments), case.function(*arguments))


def grad(case: Case) -> None:
    f, x, v = scalar(case)
    gradient = jax.jit(jax.grad(f))(x)
    near(dot(gradient, v), slope(case), np.sqrt(dot(gradient, gradient)) * 0.05)


def jvp(case: Case) -> None:
    f, x, v = scalar(case)
    gradient = jax.jit(jax.grad(f))(x)
    found = jax.jit(lambda x, v: jax.jvp(f, (x,), (v,))[1])(x, v)
    near(float(found), dot(gradient, v), np.sqrt(dot(gradient, gradient)) * 0.05)
    lin = jax.linearize(f, x)[1]
    near(float(lin(v)), float(found), 1e-3 + abs(float(found)))


def second_order(case: Case) -> None:
    f, x, v = scalar(case)
    gradient = jax.grad(f)
    wanted = along(jax.jit(gradient), x, v)
    scale = np.sqrt(dot(wanted, wanted)) + 1e-3
    over = {
        "forward over reverse": lambda x: jax.jvp(gradient, (x,), (v,))[1],
        "reverse over reverse": jax.grad(lambda x: _dot(gradient(x), v)),
        "reverse over forward": jax.grad(lambda x: jax.jvp(f, (x,), (v,))[1]),
    }
    for way, product in over.items():
        found = jax.jit(product)(x)
        apart = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, found, wanted)
        error = np.sqrt(dot(apart, apart))
        assert error <= 1e-2 * scale, f"{way}: {error} of {scale}"


def _dot(x: Any, y: Any) -> jax.Array:
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    return sum(((a * b).sum() for a, b in pairs), jnp.float32(0))


def vmap(case: Case) -> None:
    floats, others = case.arguments()
    two = jax.tree.map(lambda x: np.stack([x, 0.5 * x]), floats)
    found = jax.jit(jax.vmap(case.function, in_axes=(0, None)))(two, others)
    plain = jax.jit(case.function)
    for i in range(2):
        row = jax.tree.map(lambda x, i=i: x[i], two)
        same(jax.tree.map(lambda x, i=i: x[i], found), plain(row, others))


def exported(case: Case, open_axes: str, sizes: list[dict[str, int]]) -> None:
    plain = jax.jit(case.function)
    program = jax.export.export(plain)(*case.shapes(open_axes))
    for size in sizes:
        arguments = case.arguments(**size)
        same(program.call(*arguments), plain(*arguments))


def export_batch(case: Case) -> None:
    exported(case, "b", [dict(b=1), dict(b=3)])


def export_length(case: Case) -> None:
    if "t" not in {n for n in _letters(case)}:
        raise NotApplicable
    t = case.sizes["t"]
    exported(case, "bt", [dict(b=1, t=t), dict(b=3, t=2)])
    exported(case, "t", [dict(t=t - 2)])


class NotApplicable(Exception):
    """Raised if a function has no such axis."""


def _letters(case: Case) -> list[Any]:
    shapes = [*case.floats.values(), *(shape for shape, _ in case.others.values())]
    return [n for shape in shapes for n in shape]


def x64(case: Case) -> None:
    arguments = case.arguments()
    wanted = jax.tree.map(np.asarray, jax.jit(case.function)(*arguments))
    with jax.enable_x64(True):
        same(jax.jit(case.function)(*arguments), wanted)
        same(case.function(*arguments), wanted)


def strict(case: Case) -> None:
    floats, others = case.arguments()
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), floats)
    if "params" in floats:  # those of a model are float32
        half["params"] = floats["params"]
    with jax.numpy_dtype_promotion("strict"):
        for trees in (floats, half):
            jax.eval_shape(case.function, trees, others)
        if "grad" not in case.cannot:
            f, x, _ = scalar(case)
            jax.eval_shape(jax.grad(f), x)


def known(case: Case) -> None:
    floats, others = case.arguments()
    floats, others = (jax.tree.map(jnp.asarray, x) for x in (floats, others))
    wanted = jax.jit(case.function)(floats, others)
    same(jax.jit(lambda x: case.function(x, others))(floats), wanted)
    same(jax.jit(lambda x: case.function(floats, x))(others), wanted)
    same(jax.jit(lambda: case.function(floats, others))(), wanted)
    jax.eval_shape(lambda: case.function(floats, others))
    if "grad" not in case.cannot:
        jax.eval_shape(jax.grad(lambda x: scalar(case)[0](x)), floats)


def shard_map(case: Case) -> None:
    if "b" not in _letters(case):
        raise NotApplicable
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    arguments = case.arguments()
    written = {**case.floats, **{name: shape for name, (shape, _) in case.others.items()}}
    specs = tuple(
        {name: rows if written.get(name, ())[:1] == ("b",) else whole for name in tree}
        for tree in arguments
    )
    wanted = jax.jit(case.function)(*arguments)
    out = jax.tree.map(lambda x: rows if x.ndim else whole, wanted)
    split = jax.shard_map(case.function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    same(jax.jit(split)(*arguments), wanted)


COLUMNS: dict[str, Callable[[Case], None]] = {
    "jit": jit,
    "grad": grad,
    "jvp": jvp,
    "second order": second_order,
    "vmap": vmap,
    "export, batch": export_batch,
    "export, length": export_length,
    "x64": x64,
    "strict promotion": strict,
    "known arrays": known,
    "shard_map": shard_map,
}


def cell(case: Case, column: str) -> str:
    """Check a cell, and return its text: "yes", "", or "no: " and the reason."""
    try:
        COLUMNS[column](case)
    except NotApplicable:
        return ""
    except Exception as error:
        no = case.cannot.get(column)
        if no is None or not isinstance(error, no.raises) or no.names not in str(error):
            raise
        return f"no: {no.reason}"
    assert column not in case.cannot, "works, and the table says that it cannot"
    return "yes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, help="JSON lines: cells of earlier runs, and these")
    parser.add_argument("--write", type=Path, help="write the page of the table to this file")
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    parser.add_argument("--column", default="", help="only columns whose name contains this")
    parser.add_argument("--traceback", action="store_true", help="print where a cell fails")
    arguments = parser.parse_args()
    cells: dict[tuple[str, str], str] = {}
    if arguments.results and arguments.results.exists():
        for line in arguments.results.read_text().splitlines():
            *key, text = json.loads(line)
            cells[key[0], key[1]] = text
    failed = 0
    for name, case in all_cases().items():
        if arguments.only not in name:
            continue
        for column in COLUMNS:
            if arguments.column not in column or (name, column) in cells:
                continue
            try:
                text = cells[name, column] = cell(case, column)
            except Exception as error:  # report it in the cell and continue
                failed += 1
                print(f"{name}, {column}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                if arguments.traceback:
                    traceback.print_exc()
                continue
            if arguments.results:
                with arguments.results.open("a") as file:
                    file.write(json.dumps([name, column, text]) + "\n")
        print(name, [cells.get((name, column), "?") for column in COLUMNS], flush=True)
        jax.clear_caches()
    if arguments.write:
        arguments.write.write_text(page(cells))
    raise SystemExit(1 if failed else 0)


def page(cells: dict[tuple[str, str], str]) -> str:
    """Return the page with all rows that have a result in every cell."""
    notes: dict[str, int] = {}

    def short(text: str) -> str:
        mark, _, reason = text.partition(": ")
        return f"{mark} [{notes.setdefault(reason, len(notes) + 1)}]" if reason else mark

    rows = [
        f"| {name} | " + " | ".join(short(cells[name, column]) for column in COLUMNS) + " |"
        for name in all_cases()
        if all((name, column) in cells for column in COLUMNS)
    ]
    head = "| | " + " | ".join(COLUMNS) + " |\n|" + " --- |" * (len(COLUMNS) + 1)
    intro = (Path(__file__).parent / "page.md").read_text()
    listed = "\n".join(f"{number}. {reason}." for reason, number in notes.items())
    setting = (
        "Printed by `python -m tests.transformations --write docs/reference/transformations.md`, "
        f"with jax {jax.__version__} on {jax.default_backend()}."
    )
    return f"{intro.rstrip()}\n\n{head}\n" + "\n".join(rows) + f"\n\n{listed}\n\n{setting}\n"
