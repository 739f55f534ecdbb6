"""Plans of training and decoding steps, compiled for hardware that may not be attached.

The real step, with the placement of a run, is compiled but not run. The compiler reports the memory
of the step, and the chips' peak rates determine a lower bound on its time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled, Lowered
from jax.tree_util import KeyPath

from transformer_jax.config import AdamW, ConfigError, MeshConfig, ModelConfig, TrainConfig
from transformer_jax.config.fields import FieldValue
from transformer_jax.config.model import as_transformer
from transformer_jax.config.optimizers import Adafactor
from transformer_jax.config.tasks import ClassifyTask, PreferenceTask
from transformer_jax.models.factory import build, init_cache, init_params
from transformer_jax.models.flops import forward_flops, step_flops
from transformer_jax.models.inputs import example_inputs
from transformer_jax.pytree import Params, PyTree, cast_floats
from transformer_jax.training.adapting import FrozenBase
from transformer_jax.training.batch import Batch
from transformer_jax.training.compiled import CompiledAhead, make_programs
from transformer_jax.training.placement import ROWS, Placement
from transformer_jax.training.planning.hardware import Hardware
from transformer_jax.training.planning.memory import StepMemory, bytes_on_device, step_memory
from transformer_jax.training.planning.network import Traffic, network_traffic


@dataclass(frozen=True)
class Bounds:
    """Lower bounds on the time of a step, in seconds, for each resource."""

    compute: float
    """Time to compute all products at the chip's bfloat16 peak."""
    memory: float
    """Time to read and write each array of the step once."""
    network: float | None
    """Time for the traffic between chips at the network's peak, or None if the traffic is
    unknown."""

    @property
    def least(self) -> float:
        """Return the largest bound. The operations behind the other bounds can overlap with it."""
        return max(self.compute, self.memory, self.network or 0.0)


@dataclass(frozen=True)
class Plan:
    """Time of a step and its memory per chip."""

    hardware: Hardware
    mesh: MeshConfig
    memory: StepMemory
    cache: int
    """Size of the decoder's cache in bytes; 0 in training."""
    tokens: int
    """Number of tokens per step on all chips."""
    flops: float
    """Number of floating-point operations in a step's products on all chips."""
    compiled: bool
    """Whether the step was compiled. If not, `memory` excludes activations."""
    traffic: Traffic | None = None
    """Network traffic, or None if nothing was compiled or if this jaxlib cannot read the
    program."""
    looked_up: int = 0
    """Size in bytes of the position table and the untied token table, of which a decoding step
    reads only a few rows."""

    @property
    def total(self) -> int:
        """Return the peak memory per chip in bytes."""
        return self.memory.total + self.cache

    @property
    def fits(self) -> bool:
        """Whether the step fits in each chip's memory."""
        return self.compiled and self.total <= self.hardware.memory

    @property
    def bounds(self) -> Bounds | None:
        """Return lower bounds on the time, or None for a CPU or if nothing was compiled."""
        chip = self.hardware.chip
        if chip is None or not self.compiled:
            return None
        resident = self.memory.parameters + self.memory.optimizer - self.looked_up
        written = resident if self.cache == 0 else 0  # decoding does not write parameters
        # each temporary array is written and read at least once
        moved = resident + written + self.cache + 2 * self.memory.working
        return Bounds(
            self.flops / self.hardware.count / chip.flops,
            moved / chip.bandwidth,
            None if self.traffic is None else self.traffic.total / chip.network,
        )


def plan_training(config: TrainConfig, hardware: Hardware, *, compiled: bool = True) -> Plan:
    """Compile a training step of a transformer for hardware and return its memory and time.

    The source of an encoder-decoder also has `sequence_len` tokens. If the state and its gradients
    alone exceed a chip's memory, or if `compiled` is False, nothing is compiled, and activations
    are excluded. Raises ConfigError if the mesh and the hardware have different numbers of devices.
    """
    model = config.model
    if not isinstance(model, ModelConfig):
        raise ConfigError(
            f"model is of type {type(model).__name__}: plans support only transformers"
        )
    if config.task.makes_examples:
        rule = "plans support only tasks with rows of `context` tokens"
        raise ConfigError(f"task is {config.task.kind!r}: {rule}")
    if isinstance(config.task, PreferenceTask):
        raise ConfigError("task is 'preference': plans support only tasks with one row per example")
    if isinstance(config.task, ClassifyTask) and model.num_classes is None:
        raise ConfigError("model.num_classes is None: must be set, since a plan reads no data")
    mesh = config.mesh or MeshConfig(fsdp=hardware.count)
    config = replace(config, mesh=mesh)
    rows, length = config.batch_size, config.sequence_len
    flops = config.accumulation * rows * step_flops(config)
    tokens = config.accumulation * rows * length
    abstract = placement_on(hardware, mesh)
    programs = make_programs(config)
    frozen = () if config.lora is None else (FrozenBase(config, abstract).params,)
    template = jax.eval_shape(programs.fresh_state, np.uint32(0))
    state = abstract.state(template)
    trained = bytes_on_device(state.params)
    parameters = trained + bytes_on_device(frozen)
    gradients = trained if config.param_dtype == "float32" else 2 * trained  # in float32
    resident = StepMemory(
        parameters, bytes_on_device((state.opt_state, state.average)), 0, gradients
    )
    if not compiled or resident.total > hardware.memory:
        return Plan(hardware, mesh, resident, 0, tokens, flops, False)
    placement = placement_on(hardware, mesh, hardware.devices())
    state = placement.state(template)
    # micro-batches [A, B, T], split by row
    by_row = _sharding(placement, PartitionSpec(None, ROWS))
    array = partial(jax.ShapeDtypeStruct, sharding=by_row)
    lead = config.accumulation, rows
    given = ids = array((*lead, length), jnp.int32)  # `given` is what the first stack reads
    if model.inputs is not None:
        like = jax.eval_shape(lambda: example_inputs(model.inputs, rows, length))  # type: ignore[arg-type]
        given = array((config.accumulation, *like.shape), like.dtype)
    if model.kind == "encoder":
        has_classes = model.inputs is not None or model.num_classes is not None
        batch = Batch(given, array(lead, jnp.int32) if has_classes else ids)
    else:
        batch = Batch(ids, ids, source=given if model.kind == "encoder-decoder" else None)
    frozen = () if config.lora is None else (FrozenBase(config, placement).params,)
    assert isinstance(programs.train_step, CompiledAhead)
    with hardware.lowering():
        program = programs.train_step.function.lower(state, batch, frozen=frozen)
    found = _compile(program)
    if isinstance(found, int):
        memory = replace(resident, working=max(found - parameters - resident.optimizer, gradients))
        return Plan(hardware, mesh, memory, 0, tokens, flops, True)
    memory = step_memory(found, state, batch, frozen)
    return Plan(hardware, mesh, memory, 0, tokens, flops, True, _traffic(found, hardware.count))


def plan_decoding(
    model: ModelConfig,
    hardware: Hardware,
    *,
    batch_size: int,
    length: int,
    mesh: MeshConfig | None = None,
) -> Plan:
    """Compile a step that decodes one token per row, with a cache of `length` positions.

    The parameters and the cache use the compute dtype. Raises ConfigError if the model is not a
    decoder, or if the mesh and the hardware have different numbers of devices.
    """
    if model.kind != "decoder":
        raise ConfigError(f"kind is {model.kind!r}: decoding plans support only decoders")
    mesh = mesh or MeshConfig(tensor=hardware.count)
    if batch_size % mesh.row_shards:
        rule = f"must be a multiple of {mesh.row_shards}, the row shards of mesh {mesh}"
        raise ConfigError(f"batch_size is {batch_size}: {rule}")
    if mesh.context > 1:
        raise ConfigError(f"mesh is {mesh}: context must be 1, because decoding reads one token")
    placement = placement_on(hardware, mesh, hardware.devices())
    dtype = jnp.dtype(model.dtype)
    params = jax.eval_shape(lambda: cast_floats(init_params(model, jax.random.key(0)), dtype))
    params = placement.state(params)
    cache = jax.eval_shape(lambda: init_cache(model, batch_size, length))
    assert placement.mesh is not None
    tensor = placement.mesh.shape["tensor"]

    def placed(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        axes: list[str | tuple[str, ...] | None] = [ROWS, *(None,) * (leaf.ndim - 1)]
        if name in ("k", "v") and leaf.shape[-2] % tensor == 0:
            axes[-2] = "tensor"
        elif name == "state" and leaf.shape[1] % tensor == 0:
            axes[1] = "tensor"
        sharding = _sharding(placement, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    # split by row and, if `tensor` divides them, by key head
    cache = jax.tree_util.tree_map_with_path(placed, cache)
    rows = _sharding(placement, PartitionSpec(ROWS))
    tokens = jax.ShapeDtypeStruct((batch_size, 1), jnp.int32, sharding=rows)

    def step(params: Params, cache: PyTree, tokens: jax.Array) -> tuple[jax.Array, PyTree]:
        logits, cache = build(model).apply({"params": params}, tokens, cache=cache)
        return jnp.argmax(logits[:, -1], axis=-1), cache

    with hardware.lowering():
        program = jax.jit(step, donate_argnums=1).lower(params, cache, tokens)
    found = _compile(program)
    parameters, cache_bytes = bytes_on_device(params), bytes_on_device(cache)
    names = {"positions"} if model.tie_embeddings else {"positions", "tokens"}
    tables = [table for name, table in params["embed"].items() if name in names]
    looked_up = bytes_on_device(tables)
    # the last token that fits in the cache attends to the whole cache
    flops = forward_flops(model, length) - forward_flops(model, length - 1)
    flops *= batch_size
    if isinstance(found, int):
        sizes = StepMemory(parameters, 0, 0, max(found - parameters - cache_bytes, 0))
        return Plan(
            hardware, mesh, sizes, cache_bytes, batch_size, flops, True, looked_up=looked_up
        )
    memory = found.memory_analysis()
    assert memory is not None
    arguments = memory.argument_size_in_bytes + memory.output_size_in_bytes
    working = (
        arguments
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        - parameters
        - cache_bytes
    )
    sizes = StepMemory(parameters, 0, 0, max(working, 0))
    traffic = _traffic(found, hardware.count)
    return Plan(hardware, mesh, sizes, cache_bytes, batch_size, flops, True, traffic, looked_up)


def _compile(program: Lowered) -> Compiled | int:
    """Compile a program, or return the bytes that it needs if a TPU compiler rejects its size."""
    try:
        return program.compile()
    except jax.errors.JaxRuntimeError as error:
        used = re.search(r"\(([\d.]+)([KMGT])\) exceeds", str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or used is None:
            raise
        return int(float(used[1]) * 2 ** (10 * (1 + "KMGT".index(used[2]))))


def _traffic(program: Compiled, devices: int) -> Traffic | None:
    """Return a compiled program's traffic, or None if this jaxlib cannot parse its text."""
    # an older jaxlib may not support the instructions of a newer libtpu
    try:
        return network_traffic(str(program.as_text()), devices)
    except jax.errors.JaxRuntimeError:
        return None


def largest_batch(config: TrainConfig, hardware: Hardware, first: Plan) -> tuple[int, Plan] | None:
    """Return the largest batch size that fits and its plan, or None if no batch size fits.

    The size is a multiple of the number of row shards in the mesh. Memory is nearly linear in the
    batch size, so the limit is extrapolated from two sizes and then bracketed by up to four more
    compilations. The result is usually within a sixteenth of the largest size that fits.
    """
    unit = first.mesh.row_shards
    plans = {config.batch_size: first}

    def at(size: int) -> Plan:
        if size not in plans:
            plans[size] = plan_training(replace(config, batch_size=size), hardware)
        return plans[size]

    if not first.compiled:
        return None
    one, two = config.batch_size, max(config.batch_size // 2 // unit * unit, unit)
    two = two if two != one else 2 * one
    slope = (at(one).total - at(two).total) / (one - two)
    # if memory does not grow with the batch size, it implies no limit
    if slope <= 0:
        return None
    room = hardware.memory - at(one).total
    at(max(int(one + room / slope) // unit * unit, unit))
    for _ in range(4):
        fitting = max((size for size, plan in plans.items() if plan.fits), default=0)
        failing = min((size for size, plan in plans.items() if not plan.fits), default=None)
        if failing is None:  # if there is more room than predicted, add a quarter
            at(max(fitting * 5 // 4 // unit * unit, fitting + unit))
        elif failing - fitting <= max(unit, fitting // 16):
            break
        else:
            at(max((fitting + failing) // 2 // unit * unit, unit))
    fitting = max((size for size, plan in plans.items() if plan.fits), default=0)
    return (fitting, plans[fitting]) if fitting else None


def remedies(config: TrainConfig, hardware: Hardware) -> Iterator[tuple[str, TrainConfig]]:
    """Yield changes that may make a run fit, mildest first. Each includes the previous changes.

    A change is skipped if its state and gradients alone do not fit.
    """
    model = as_transformer(config.model)
    mesh = config.mesh or MeshConfig(fsdp=hardware.count)
    changed, flags = config, list[str]()

    def with_model(**changes: FieldValue) -> TrainConfig:
        return replace(changed, model=replace(changed.model, **changes))

    steps: list[tuple[bool, str, Callable[[], TrainConfig]]] = [
        (model.remat != "full", "--remat full", lambda: with_model(remat="full")),
        (
            not (model.scan_layers or isinstance(model.window, tuple) or model.mixers)
            and not (model.experts and model.experts.dense_layers),
            "--scan-layers True",
            lambda: with_model(scan_layers=True),
        ),
        (
            config.batch_size > mesh.row_shards,
            f"--batch-size {mesh.row_shards}",
            lambda: replace(changed, batch_size=mesh.row_shards),
        ),
        (
            config.param_dtype == "float32",
            "--param-dtype bfloat16",
            lambda: replace(changed, param_dtype="bfloat16"),
        ),
        (
            isinstance(config.optimizer, AdamW),
            "--optimizer adafactor",
            lambda: replace(changed, optimizer=Adafactor()),
        ),
    ]
    for applies, flag, change in steps:
        if not applies:
            continue
        changed = change()
        flags.append(flag)
        if plan_training(changed, hardware, compiled=False).total <= hardware.memory:
            yield " ".join(flags), changed


def least_chips(config: TrainConfig, hardware: Hardware) -> int | None:
    """Return the smallest power-of-two number of chips on which a run fits with `fsdp`.

    Only the state and its gradients are considered. Returns None if 4096 chips are not enough,
    which can happen because an axis is replicated if its size is not divisible by the number of
    chips.
    """
    for count in (2**n for n in range(13)):
        # `fsdp` also splits the rows, so each chip needs one
        run = replace(config, mesh=MeshConfig(fsdp=count), batch_size=count)
        plan = plan_training(run, replace(hardware, count=count), compiled=False)
        if plan.total <= hardware.memory:
            return count
    return None


def placement_on(
    hardware: Hardware, mesh: MeshConfig, devices: list[jax.Device] | None = None
) -> Placement:
    """Return the placement on devices, or on an abstract mesh if `devices` is None."""
    if mesh.devices != hardware.count:
        found = "has one chip" if hardware.count == 1 else f"has {hardware.count} chips"
        rule = f"has {mesh.devices} devices, but {hardware.name} {found}"
        raise ConfigError(f"mesh is {str(mesh)!r}: {rule}")
    shape, names = tuple(mesh.shape.values()), tuple(mesh.shape)
    axes = (AxisType.Explicit,) * len(shape)
    if devices is None:
        abstract: Any = jax.sharding.AbstractMesh(shape, names, axis_types=axes)
        return Placement(abstract)
    return Placement(Mesh(np.array(devices).reshape(shape), names, axis_types=axes))


def _sharding(placement: Placement, spec: PartitionSpec) -> NamedSharding:
    assert placement.mesh is not None
    return NamedSharding(placement.mesh, spec)
