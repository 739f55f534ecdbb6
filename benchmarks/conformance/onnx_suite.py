"""Run the attention cases of ONNX's test suite on this library's functions.

    python -m benchmarks.conformance.onnx_suite
    python -m benchmarks.conformance.onnx_suite --only native --write benchmarks/results/onnx_suite

The installed onnx package generates the cases, which consist of a model with one `Attention`,
`FlexAttention`, or `LinearAttention` node, its inputs, and the expected outputs. All outputs are
compared with the tolerances of each case. For 16-bit dtypes, a difference of two units in the last
place is allowed, as in ONNX for bfloat16. The gradients of query, key, and value along random
directions are compared with finite differences of ONNX's reference implementation in float64.
ONNX computes `LinearAttention` only in float32, so its gradients are not compared.

The cases of `LinearAttention` run on `transformer_jax.gated_delta_rule` and the other functions of
its family, in chunks and one token at a time. These functions have no implementation other than
"xla".
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.conformance.outcomes import Cell, write
from benchmarks.peers import Absent, imported
from transformer_jax import Causal, Mask, Padding, Window, dot_product_attention
from transformer_jax.attention import (
    delta_rule,
    gated_delta_rule,
    gated_linear_attention,
    linear_attention,
)
from transformer_jax.kernels import Target, using

OPERATORS = ("Attention", "FlexAttention", "LinearAttention")
IMPLEMENTATIONS: dict[str, Target | None] = {
    "xla": None, "blockwise": None, "native": None, "tpu, interpreted": Target("tpu", True),
}  # fmt: skip
"""Implementations, keyed by name, with the target of those that are interpreted on a CPU.

The kernels for NVIDIA GPUs are not included because they need a head dimension of at least 32. In
ONNX's cases, it is at most 16.
"""
NODE_INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
NODE_OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")
LINEAR_INPUTS, LINEAR_OUTPUTS = (
    ("Q", "K", "V", "past_state", "decay", "beta"),
    ("Y", "present_state"),
)
RULES: dict[str, Callable[..., Any]] = {
    "linear": functools.partial(linear_attention, feature_map=None, normalize=False),
    "gated": gated_linear_attention,
    "delta": delta_rule,
    "gated_delta": gated_delta_rule,
}
"""Functions for `LinearAttention`, keyed by its update rule."""
RAW, CAPPED, BIASED, WEIGHTS = range(4)  # possible values of qk_matmul_output_mode


@dataclass(frozen=True)
class OnnxCase:
    """One case of the suite.

    Attributes:
        attributes: attributes of the node, keyed by name.
        inputs: inputs of the node, keyed by their names in the operator.
        outputs: expected outputs, keyed in the same way.
        model: ONNX model.
    """

    name: str
    operator: str
    attributes: dict[str, Any]
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]
    rtol: float
    atol: float
    model: Any

    @property
    def flat(self) -> bool:
        """Whether heads and features share an axis, [B, T, N H]."""
        return self.inputs["Q"].ndim == 3

    def heads(self, name: str) -> np.ndarray:
        """Return an input of the node in this library's layout, [B, T, N, H]."""
        array = self.inputs[name]
        if array.ndim == 4:
            return array.swapaxes(1, 2)
        count = self.attributes["q_num_heads" if name == "Q" else "kv_num_heads"]
        return array.reshape(*array.shape[:2], count, -1)

    def from_heads(self, array: np.ndarray) -> np.ndarray:
        """Return an array [B, T, N, H] in the layout of the node."""
        return array.reshape(*array.shape[:2], -1) if self.flat else array.swapaxes(1, 2)


def suite() -> Iterator[OnnxCase]:
    """Yield the cases in the installed onnx package. Raise `Absent` if it is missing."""
    onnx = imported("onnx")
    node_cases = imported("onnx.backend.test.case.node")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from the cases of other operators
        found = node_cases.collect_testcases(None)
    for case in found:
        nodes = case.model.graph.node
        if len(nodes) != 1 or nodes[0].op_type not in OPERATORS:
            continue
        (node,) = nodes
        attributes = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
        arrays, expected = case.data_sets[0]
        inputs, outputs = NODE_INPUTS, NODE_OUTPUTS
        if node.op_type == "LinearAttention":
            inputs, outputs = LINEAR_INPUTS, LINEAR_OUTPUTS
        given = [inputs[at] for at, name in enumerate(node.input) if name]
        wanted = [outputs[at] for at, name in enumerate(node.output) if name]
        yield OnnxCase(
            case.name, node.op_type, attributes,
            dict(zip(given, map(np.asarray, arrays), strict=True)),
            dict(zip(wanted, map(np.asarray, expected), strict=True)),
            case.rtol, case.atol, case.model,
        )  # fmt: skip


def options(case: OnnxCase) -> tuple[dict[str, Any], int]:
    """Return the arguments of `dot_product_attention` for a case and the number of cached keys.

    Raises:
        Absent: If the library has no argument for a feature of the node.
    """
    found: dict[str, Any] = {"scale": case.attributes.get("scale")}
    for name in ("score_mod", "prob_mod"):
        if name in case.attributes:
            found |= _modification(case, name)
    found["softcap"] = case.attributes.get("softcap", found.get("softcap", 0.0)) or None
    past = case.inputs["past_key"].shape[2] if "past_key" in case.inputs else 0
    query, key = case.heads("Q"), case.heads("K")
    B, T, N, _ = query.shape
    S = key.shape[1] + past
    lengths = case.inputs.get("nonpad_kv_seqlen")
    start = np.full(B, past) if lengths is None else lengths - T
    found["q_positions"] = jnp.asarray(start[:, None] + np.arange(T), jnp.int32)
    masks: list[Mask] = [found.pop("mask")] if "mask" in found else []
    if case.attributes.get("is_causal"):
        masks.append(Causal())
    sides = [case.attributes.get(f"{side}_window_size", -1) for side in ("left", "right")]
    if max(sides) >= 0:
        masks.append(Window(*(None if side < 0 else side + 1 for side in sides)))
    if lengths is not None:
        masks.append(Padding(np.arange(S) < lengths[:, None]))
    if masks:
        found["mask"] = functools.reduce(lambda a, b: a & b, masks)
    if (mask := case.inputs.get("attn_mask")) is not None:
        # The mask depends on indices; `Dense` depends on positions, which start at `start`.
        bias = np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask.astype(np.float32)
        missing = [(0, 0)] * (bias.ndim - 1) + [(0, S - bias.shape[-1])]
        bias = np.pad(bias, missing, constant_values=-np.inf)
        found["bias"] = jnp.asarray(np.broadcast_to(bias, (B, N, T, S)), jnp.float32)
    return found, past


def _modification(case: OnnxCase, name: str) -> dict[str, Any]:
    """Return the arguments for a graph that modifies scores.

    Causal masks, soft caps, and sums are converted to arguments. A graph is recognized by its
    operators. An incorrect conversion would fail the comparison.
    """
    onnx, graph = imported("onnx"), case.attributes[name]
    kinds = [node.op_type for node in graph.node]
    constants = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}
    if name == "score_mod" and kinds == ["Div", "Tanh", "Mul"]:
        return {"softcap": float(constants["cap"])}
    if name == "score_mod" and kinds == ["Add"]:
        (constant,) = constants.values()
        return {"bias": jnp.full((1, 1, 1, 1), constant, jnp.float32)}
    if name == "score_mod" and kinds[-2:] == ["GreaterOrEqual", "Where"]:
        return {"mask": Causal()}
    if name == "score_mod" and kinds[-3:] == ["Sub", "Cast", "Add"]:
        T, S = case.heads("Q").shape[1], case.heads("K").shape[1]
        bias = np.arange(T)[:, None] - np.arange(S)
        return {"bias": jnp.asarray(bias[None, None], jnp.float32)}
    if name == "prob_mod" and kinds == ["Mul"]:
        (constant,) = constants.values()
        return {"factor": float(constant)}  # of all weights, and therefore of the output
    raise Absent(f"{name} of {', '.join(kinds)}: not a sum, a soft cap, a mask or a factor")


def judge(implementation: str, case: OnnxCase) -> Cell:
    """Run one case and compare its outputs and gradients."""
    cell = functools.partial(Cell, implementation, case.name)
    if case.operator == "LinearAttention":
        if implementation != "xla":
            return cell("inexpressible", "linear attention is implemented only in xla")
        wrong = [differences(case, linear_outputs(case, size)) for size in (64, 1)]
        return cell("wrong", wrong[0] or wrong[1]) if any(wrong) else cell("equal")
    try:
        arguments, past = options(case)
    except Absent as reason:
        return cell("inexpressible", str(reason))
    target = IMPLEMENTATIONS[implementation]
    name = implementation if target is None else "pallas"
    plain = functools.partial(dot_product_attention, implementation=name)
    factor = arguments.pop("factor", 1.0)

    def attend(*arrays: jax.Array) -> jax.Array:
        return factor * plain(*arrays, **arguments)

    keys, values = (_with_past(case, one, past) for one in ("key", "value"))
    query = jnp.asarray(case.heads("Q"))
    with contextlib.nullcontext() if target is None else using(target):
        try:
            found = {
                "Y": case.from_heads(np.asarray(jax.jit(attend)(query, keys, values))),
                "present_key": np.asarray(keys).swapaxes(1, 2),
                "present_value": np.asarray(values).swapaxes(1, 2),
            }
            if "qk_matmul_output" in case.outputs:
                mode = case.attributes.get("qk_matmul_output_mode", RAW)
                found["qk_matmul_output"] = scores(plain, query, keys, mode, arguments)
            gradients = gradients_off(case, attend, query, keys, values, past)
        except NotImplementedError as error:
            return cell("refused", " ".join(str(error).split())[:200])
    wrong = differences(case, found) or gradients
    return cell("wrong", wrong) if wrong else cell("equal")


def differences(case: OnnxCase, found: dict[str, np.ndarray]) -> str:
    """Return the first output that differs from the expected one, or an empty string."""
    for output, expected in case.outputs.items():
        unit = 2 * float(jnp.finfo(expected.dtype).eps) if expected.dtype.itemsize == 2 else 0.0
        rtol, expected = max(case.rtol, unit), expected.astype(np.float64)
        result = found[output].astype(np.float64)
        if not np.allclose(result, expected, rtol, case.atol):
            off = np.abs(np.nan_to_num(result) - np.nan_to_num(expected)).max()
            return f"{output} is off by {off:.2g}"
    return ""


def linear_outputs(case: OnnxCase, chunk_size: int) -> dict[str, np.ndarray]:
    """Return the outputs of a case of `LinearAttention`."""
    rule = case.attributes.get("update_rule", b"gated_delta").decode()
    arrays = [jnp.asarray(case.heads(name)) for name in "QKV"]
    _, _, states, width = arrays[1].shape
    for name in ("decay", "beta"):
        if name in case.inputs:
            array = jnp.asarray(case.inputs[name])
            # one number for all states, for each state, or for each key channel of each state
            B, T, size = array.shape
            if size <= states:
                array = jnp.broadcast_to(array, (B, T, states))
            arrays.append(array if size <= states else array.reshape(B, T, states, width))
    out, state = RULES[rule](
        *arrays, scale=case.attributes.get("scale") or None, return_state=True,
        initial_state=case.inputs.get("past_state"), chunk_size=chunk_size,
    )  # fmt: skip
    return {"Y": case.from_heads(np.asarray(out)), "present_state": np.asarray(state)}


def _with_past(case: OnnxCase, name: str, past: int) -> jax.Array:
    """Return the cached keys or values, followed by the new ones, [B, S, K, H]."""
    new = case.heads("K" if name == "key" else "V")
    if past:
        new = np.concatenate([case.heads(f"past_{name}"), new], axis=1)
    return jnp.asarray(new)


def scores(
    attend: Callable[..., Any],
    query: jax.Array,
    key: jax.Array,
    mode: int,
    arguments: dict[str, Any],
) -> np.ndarray:
    """Return `qk_matmul_output`, [B, N, T, S], which is the weights or scores computed from them.

    If the values are the identity matrix, the output is the weights p, and log p + lse is the
    score.
    """
    B, S, K, _ = key.shape
    identity = jnp.broadcast_to(jnp.eye(S, dtype=key.dtype)[:, None], (B, S, K, S))
    if mode == RAW:
        arguments = {name: arguments[name] for name in ("scale",)}
    elif mode == CAPPED:
        arguments = {name: arguments[name] for name in ("scale", "softcap")}
    attend = functools.partial(attend, return_lse=True, **arguments)
    weights, lse = jax.jit(attend)(query, key, identity)
    if mode == WEIGHTS:
        return np.asarray(weights).swapaxes(1, 2)
    with np.errstate(divide="ignore"):
        found = np.log(np.asarray(weights, np.float64)) + np.asarray(lse, np.float64)[..., None]
    return found.swapaxes(1, 2)


def gradients_off(
    case: OnnxCase, attend: Callable[..., Any], query: jax.Array, keys: jax.Array,
    values: jax.Array, past: int,
) -> str:  # fmt: skip
    """Return the first gradient that differs from finite differences, or an empty string.

    The bound on a directional derivative has two parts. The first is the rounding error of sqrt(n)
    terms of the largest size in the dtype of the inputs. The second is the error of a central
    difference with step 1e-5 in float64.
    """
    evaluate = imported("onnx.reference").ReferenceEvaluator(in_float64(case.model))
    node_inputs = [name for name in case.model.graph.node[0].input if name]
    named = dict(zip(case.inputs, node_inputs, strict=True))
    exact = {
        name: array if array.dtype in (bool, np.int64) else array.astype(np.float64)
        for name, array in case.inputs.items()
    }
    random = np.random.default_rng(sum(map(ord, case.name)))
    rounded = jnp.asarray(random.standard_normal((*query.shape[:3], values.shape[-1])), query.dtype)
    found = jax.jit(lambda *inputs: jax.vjp(attend, *inputs)[1](rounded))(query, keys, values)
    cotangent = np.asarray(rounded).astype(np.float64)
    unit, step = float(jnp.finfo(query.dtype).eps), 1e-5
    for name, gradient in zip("QKV", found, strict=True):
        new = np.asarray(gradient).astype(np.float64)[:, past if name != "Q" else 0 :]
        for _ in range(3):
            direction = random.standard_normal(new.shape)
            along = case.from_heads(direction)

            def loss(sign: float, name: str = name, along: np.ndarray = along) -> float:
                moved = exact | {name: exact[name] + sign * step * along}
                feeds = {named[one]: array for one, array in moved.items()}
                (result, *_) = evaluate.run(None, feeds)
                return float((result * case.from_heads(cotangent)).sum())

            with np.errstate(all="ignore"):
                expected = (loss(1) - loss(-1)) / (2 * step)
            terms = np.abs(new * direction)
            bound = 8 * unit * (terms.sum() + new.size**0.5 * np.abs(cotangent).max()) + 1e-6
            off = abs((new * direction).sum() - expected)
            if not off <= bound:
                return f"gradient of {name} is off by {off:.2g} (bound {bound:.1g})"
    return ""


def in_float64(model: Any) -> Any:
    """Return a copy of a model whose score modifications have float64 constants and casts."""
    onnx = imported("onnx")
    kinds = onnx.TensorProto
    floats = (kinds.FLOAT, kinds.FLOAT16, kinds.BFLOAT16)
    model = onnx.ModelProto.FromString(model.SerializeToString())
    for attribute in model.graph.node[0].attribute:
        for constant in attribute.g.initializer:
            if constant.data_type in floats:
                array = onnx.numpy_helper.to_array(constant).astype(np.float64)
                constant.CopyFrom(onnx.numpy_helper.from_array(array, constant.name))
        for cast in (node for node in attribute.g.node if node.op_type == "Cast"):
            for to in cast.attribute:
                to.i = kinds.DOUBLE if to.i in floats else to.i
    return model


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = list(IMPLEMENTATIONS)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--case", default="", help="run the cases whose name contains this text")
    parser.add_argument("--write", metavar="PATH", type=Path, help="write PATH.json and PATH.md")
    chosen = parser.parse_args(argv)
    selected = [case for case in suite() if chosen.case in case.name]
    cells = []
    for name in chosen.only:
        for case in selected:
            cells.append(judge(name, case))
        counts = Counter(cell.kind for cell in cells if cell.implementation == name)
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        print(f"{name}: {kinds}", flush=True)
    text = table(selected, cells)
    if chosen.write is None:
        print(f"\n{text}")
        return 0
    versions = {package: imported(package).__version__ for package in ("onnx", "jax", "numpy")}
    write(chosen.write, versions, cells, text)
    return 0


def table(selected: Sequence[OnnxCase], cells: Sequence[Cell]) -> str:
    """Return the number of cases per operator, implementation, and outcome, and the reasons."""
    operators = {case.name: case.operator for case in selected}
    names = list(dict.fromkeys(cell.implementation for cell in cells))
    lines = [f"| operator | cases | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for operator in dict.fromkeys(operators.values()):
        row = []
        for name in names:
            counts = Counter(
                cell.kind for cell in cells
                if cell.implementation == name and operators[cell.case] == operator
            )  # fmt: skip
            row.append(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
        lines.append(
            f"| {operator} | {[*operators.values()].count(operator)} | {' | '.join(row)} |"
        )
    reasons: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        if cell.kind != "equal":
            cases = reasons.setdefault(f"{cell.kind}: {cell.text}", {})
            cases.setdefault(cell.case, []).append(cell.implementation)
    lines.append("")
    for reason, cases in reasons.items():
        by = dict.fromkeys(name for found in cases.values() for name in found)
        shown = ", ".join(list(cases)[:2]) + (", ..." if len(cases) > 2 else "")
        lines.append(f"- {reason} ({'; '.join(by)}): {len(cases)} of the cases: {shown}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
