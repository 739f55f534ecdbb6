"""Helpers for peers, and the error for a contender that is not measured."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import jax


class Absent(Exception):
    """Error that contains the reason why a contender is not measured."""


def imported(package: str) -> Any:
    """Import a package that is needed only for benchmarks, or raise `Absent`."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise Absent(f"{error.name} is not installed") from error


def onnx_session(node: Any, feeds: dict[str, Any], shape: Sequence[int], opset: int) -> Any:
    """Return an onnxruntime session for a single node, which uses all cores of a CPU.

    Args:
        node: ONNX node whose input names are in `feeds` and whose only output is "y".
        feeds: arrays, keyed by input name. They determine the shapes and dtypes in the graph. The
            output "y" has the dtype of the first array.
        shape: shape of "y".
        opset: version of ONNX's operators.
    """
    onnx, runtime = imported("onnx"), imported("onnxruntime")
    value, operators = onnx.helper.make_tensor_value_info, onnx.helper.make_opsetid
    kinds = {n: onnx.helper.np_dtype_to_tensor_dtype(x.dtype) for n, x in feeds.items()}
    inputs = [value(name, kinds[name], x.shape) for name, x in feeds.items()]
    output = value("y", kinds[next(iter(feeds))], shape)
    graph = onnx.helper.make_graph([node], "attention", inputs, [output])
    opsets = [operators("", opset), operators("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=11)
    settings = runtime.SessionOptions()
    settings.intra_op_num_threads = cores()
    return runtime.InferenceSession(
        model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )


def cores() -> int:
    """Return the number of threads for a peer, which is one per core that this process can use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def torch_and_device() -> tuple[Any, str]:
    """Return torch, set to use all cores, and its name for JAX's device, or raise `Absent`."""
    try:
        import torch
    except ImportError as error:
        raise Absent("torch is not installed") from error
    if jax.default_backend() == "cpu":
        torch.set_num_threads(cores())
        return torch, "cpu"
    if not torch.cuda.is_available():
        raise Absent("this torch has no GPU")
    return torch, "cuda"
