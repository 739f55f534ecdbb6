r"""Estimate the memory and time of a training or decoding step on given hardware.

    python -m transformer_jax plan --target tpu-v5e-256 --preset llama3-8b --context 4096 \
        --mesh fsdp=64,tensor=4 --batch-size 64 --scan-layers True --remat full
    python -m transformer_jax plan --target h200 --model FOLDER_OR_ID --batch-size 4
    python -m transformer_jax plan --target h200 --preset llama3-8b --decode --batch-size 32
    python -m transformer_jax plan --target cpu --model runs/book
    python -m transformer_jax plan --target tpu-v5p-128,tpu-v5p-512 --preset llama3-8b \
        --lengths 131072,1048576

The step is compiled for the target, which does not have to be attached. Nothing is run, and no data
is read. The flags of train.py describe the run. A TPU target needs `pip install libtpu`, and a GPU
target needs `pip install "jax[cuda13]"`. Only 75 % of the GPU memory is counted, which is JAX's
default. XLA_PYTHON_CLIENT_MEM_FRACTION sets a different fraction.

With --lengths, nothing is compiled. Formulas compare the ways to split rows of these lengths.

The targets are cpu, h200, h200-N, tpu-v5e-N, tpu-v5p-N and tpu-v6e-N.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transformer_jax.cli.command import run
from transformer_jax.cli.flags import Path, Text
from transformer_jax.cli.run_flags import FLAGS, RunFlags, Start, configure
from transformer_jax.config import PRESETS, ConfigError, TrainConfig
from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.config.kinds import names_of
from transformer_jax.config.model import as_transformer

if TYPE_CHECKING:
    from transformer_jax.training.planning.plan import Plan

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Command-line options, in addition to the fields of a run."""

    target: str
    """Hardware, such as cpu, h200 or tpu-v5e-256. With --lengths, several names, separated by
    commas."""
    model: str | None = None
    """Folder of a run to continue with changes from the flags, or folder or ID of a published model
    to fine-tune."""
    preset: str | None = field(default=None, metadata={"known": PRESETS})
    """Model and recipe to start from:"""
    decode: bool = False
    """Plan a decoding step instead of a training step."""
    lengths: tuple[int, ...] | None = None
    """Print a table of meshes for training on rows of these numbers of tokens, such as
    131072,1048576."""
    quick: bool = False
    """Skip the search for the largest batch and for changes that would make the step fit."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0 if the step fits.

    Status 1 means that the step does not fit or that something cannot be read. Status 2 means a
    usage error.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # do not use attached accelerators
    return run(
        PlanOptions, argv, lambda options, texts: 0 if plan(options, texts) else 1, FLAGS,
        name="plan",
    )  # fmt: skip


def plan(options: PlanOptions, texts: Mapping[Path, Text]) -> bool:
    """Print the plan for the run that the flags describe, and return whether it fits."""
    from transformer_jax.loading import is_run
    from transformer_jax.models.factory import num_params
    from transformer_jax.models.flops import active_params
    from transformer_jax.training.planning.hardware import find_hardware
    from transformer_jax.training.planning.plan import plan_decoding, plan_training

    start, name = Start(preset=options.preset), options.model
    # --model is a kind in train.py and a folder in the other commands. A kind takes precedence.
    if name in names_of(AnyModelConfig):
        start = Start(preset=options.preset, model=name)
    elif name is not None:
        other_starts = {
            "preset": options.preset,
            "init_from": texts.get(("init_from",)),
            "out": texts.get(("out",)),
        }
        for one, value in other_starts.items():
            if value is not None:
                raise ConfigError(f"pass only one of model and {one}")
        if is_run(name):
            start, texts = Start(resume=True), {**texts, ("out",): name}
        else:
            texts = {**texts, ("init_from",): name}
    config = configure(RunFlags(start, texts))[0]
    if options.lengths is not None:
        unread = {"mesh", "batch_size", "accumulation", "context"} & {path[0] for path in texts}
        unread |= {"lora"} if config.lora is not None else set()
        unread |= {name for name in ("decode", "quick") if getattr(options, name)}
        if unread:
            rule = "the table compares all meshes for training all parameters on one row each"
            raise ConfigError(f"lengths is not supported with {', '.join(sorted(unread))}: {rule}")
        return _print_lengths(config, options.target.split(","), options.lengths)
    hardware = find_hardware(options.target)
    if not config.model.supports("plan"):
        kind = type(config.model).__name__
        raise ConfigError(f"model is of type {kind}: only transformers can be planned")
    model = as_transformer(config.model)
    active = "" if model.experts is None else f" ({active_params(model):,} for each token)"
    print(
        f"{model.kind} of {num_params(model):,} parameters{active}, vocabulary of "
        f"{model.vocab_size:,}, computing in {model.dtype}, for {options.target}",
        flush=True,
    )
    if options.decode:
        length = config.sequence_len
        found = plan_decoding(
            model, hardware, batch_size=config.batch_size, length=length, mesh=config.mesh
        )
        batch = f"{config.batch_size:,} rows of {length:,} positions"
        print(f"decoding one token for {batch}, over {found.mesh}")
        _print(found)
        return found.fits
    found = plan_training(config, hardware)
    rows = config.accumulation * config.batch_size
    print(f"training on {rows:,} x {config.sequence_len:,} tokens per step, over {found.mesh}")
    _print(found)
    if options.quick:
        return found.fits
    from transformer_jax.training.planning.plan import largest_batch, least_chips, remedies

    largest = largest_batch(config, hardware, found)
    if largest is not None:
        size, plan = largest
        print(f"largest --batch-size        {size:,} ({plan.total / GIB:.3f} GiB)")
    if found.fits:
        return True
    for flags, changed in remedies(config, hardware):
        plan = plan_training(changed, hardware)
        if plan.fits:
            print(f"fits with                   {flags} ({plan.total / GIB:.3f} GiB)")
            break
    else:
        print("no remat, batch size or optimizer makes it fit on this target")
    if hardware.chip is not None and not found.compiled:
        least = least_chips(config, hardware)
        if least is not None:
            print(f"state and gradients only    fit if sharded with --mesh fsdp={least}")
    return False


def _print(found: Plan) -> None:
    """Print the memory that one chip needs for each purpose, and the minimum time per step."""
    memory, hardware = found.memory, found.hardware
    chip = "this machine" if hardware.chip is None else f"a chip ({hardware.chip.name})"
    kinds = [
        ("parameters", memory.parameters), ("optimizer", memory.optimizer), ("cache", found.cache),
        ("inputs", memory.inputs),
        ("gradients and activations" if found.compiled else "gradients", memory.working),
    ]  # fmt: skip
    if found.cache:
        kinds[-1] = "activations", memory.working
    print(f"memory of {chip}, GiB")
    for kind, size in kinds:
        if size:
            print(f"  {kind:26} {size / GIB:9.3f}")
    more = "" if found.compiled else " or more (not compiled)"
    room = f"{hardware.memory / GIB:.3f}: {'fits' if found.fits else 'does not fit'}"
    print(f"  {'total':26} {found.total / GIB:9.3f}{more} of {room}")
    print(f"operations per token        {found.flops / found.tokens / 1e9:9.3f} GFLOP")
    bounds = found.bounds
    if bounds is not None:
        network = "unknown (this jaxlib cannot read the program)"
        if bounds.network is not None:
            network = _time(bounds.network)
        print(
            f"minimum time of a step      compute {_time(bounds.compute)}, "
            f"memory {_time(bounds.memory)}, network {network}"
        )
        rate = found.tokens / bounds.least
        chips = "1 chip" if hardware.count == 1 else f"{hardware.count} chips"
        print(f"maximum throughput          {rate:,.0f} tokens/s on {chips}")
        if found.traffic is not None and found.traffic.unknown_loops:
            print(f"network: {found.traffic.unknown_loops} collectives in loops of unknown length")
    elif hardware.chip is None:
        print("minimum time of a step      unknown: the peak rates of this machine are not known")


def _print_lengths(config: TrainConfig, targets: Sequence[str], lengths: Sequence[int]) -> bool:
    """Print the plans of all meshes, and return whether every length fits on every target."""
    from transformer_jax.training.planning.hardware import find_hardware
    from transformer_jax.training.planning.lengths import plan_lengths

    fits, found = True, [find_hardware(target) for target in targets]
    for length in lengths:
        if length < 1:
            raise ConfigError(f"lengths is {length}: must be positive")
    for one in found:
        if one.chip is None:
            raise ConfigError(f"target is {one.name!r}: --lengths needs published peak rates")
    print("training with remat=full, one row for each device on fsdp; * is the fastest that fits")
    print("GB sent by a device in a step: keys and values (ring), parameters; s: minimum times\n")
    columns = "target", "tokens", "fsdp x context", "GiB", "ring", "params", "compute", "network"
    print("{:12} {:>9}  {:14} {:>7} {:>7} {:>7} {:>9} {:>9}".format(*columns), "   tokens/s")
    for hardware in found:
        for length in lengths:
            plans = [*plan_lengths(config, hardware, length)]
            fitting = [plan for plan in plans if plan.fits]
            best = max(fitting, key=lambda plan: plan.rate, default=None)
            fits = fits and best is not None
            for plan in plans:
                mesh = f"{plan.mesh.fsdp} x {plan.mesh.context}"
                mark = "*" if plan is best else "" if plan.fits else "does not fit"
                print(
                    f"{hardware.name:12} {length:9,}  {mesh:14} {plan.memory.total / GIB:7.1f} "
                    f"{plan.ring / 1e9:7.1f} {plan.parameters / 1e9:7.1f} {plan.compute:9.2f} "
                    f"{plan.network:9.2f} {plan.rate:11,.0f} {mark}".rstrip()
                )
    return fits


def _time(seconds: float) -> str:
    return f"{seconds:,.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
