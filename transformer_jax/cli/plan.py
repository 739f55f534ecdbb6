r"""Say what a training or decoding step takes on hardware, before paying for it.

    python -m transformer_jax plan --target tpu-v5e-256 --preset llama3-8b --context 4096 \
        --mesh fsdp=64,tensor=4 --batch-size 64 --scan-layers True --remat full
    python -m transformer_jax plan --target h200 --model FOLDER_OR_ID --batch-size 4
    python -m transformer_jax plan --target h200 --preset llama3-8b --decode --batch-size 32
    python -m transformer_jax plan --target cpu --model runs/book

The step is compiled for the target, which need not be attached; nothing is run, and no data is
read. The flags of train.py say what the run is. A TPU needs `pip install libtpu`, a GPU
`pip install "jax[cuda13]"`; only 75 % of GPU memory is counted, JAX's default
(XLA_PYTHON_CLIENT_MEM_FRACTION sets another share).

Targets: cpu, h200, h200-N, tpu-v5e-N, tpu-v5p-N, tpu-v6e-N.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transformer_jax.cli.command import run
from transformer_jax.cli.flags import Path, Text
from transformer_jax.cli.run_flags import FLAGS, RunFlags, Start, configure
from transformer_jax.config import PRESETS, ConfigError
from transformer_jax.config.architectures import AnyModelConfig
from transformer_jax.config.kinds import names_of
from transformer_jax.config.model import as_transformer

if TYPE_CHECKING:
    from transformer_jax.training.planning.plan import Plan

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of the command, next to the fields of a run."""

    target: str
    """Hardware: cpu, h200, tpu-v5e-256, ..."""
    model: str | None = None
    """The folder of a run, which is planned with the flags' changes, or a published model to
    fine-tune, a folder or an id."""
    preset: str | None = field(default=None, metadata={"known": PRESETS})
    """Model and recipe to start from:"""
    decode: bool = False
    """Plan the writing of a token, not training."""
    quick: bool = False
    """Do not look for the largest batch, or for remedies."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    0; 1 where the step does not fit, or something cannot be read; 2: usage.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs on what may be attached
    return run(
        PlanOptions, argv, lambda own, given: 0 if plan(own, given) else 1, FLAGS, name="plan"
    )


def plan(own: PlanOptions, given: Mapping[Path, Text]) -> bool:
    """Print the plan of the run that the flags describe; return whether it fits."""
    from transformer_jax.loading import is_run
    from transformer_jax.models.factory import num_params
    from transformer_jax.models.flops import active_params
    from transformer_jax.training.planning.hardware import find_hardware
    from transformer_jax.training.planning.plan import plan_decoding, plan_training

    start, name = Start(preset=own.preset), own.model
    # --model means a kind in train.py and a folder in other commands: a kind goes first.
    if name in names_of(AnyModelConfig):
        start = Start(preset=own.preset, model=name)
    elif name is not None:
        begins = {
            "preset": own.preset,
            "init_from": given.get(("init_from",)),
            "out": given.get(("out",)),
        }
        for one, value in begins.items():
            if value is not None:
                raise ConfigError(f"model and {one}: a model is planned with its own config")
        if is_run(name):
            start, given = Start(resume=True), {**given, ("out",): name}
        else:
            given = {**given, ("init_from",): name}
    config = configure(RunFlags(start, given))[0]
    hardware = find_hardware(own.target)
    if not config.model.supports("plan"):
        kind = type(config.model).__name__
        raise ConfigError(f"model is a {kind}: plans are made of transformers")
    model = as_transformer(config.model)
    active = "" if model.experts is None else f" ({active_params(model):,} for each token)"
    print(
        f"{model.kind} of {num_params(model):,} parameters{active}, vocabulary of "
        f"{model.vocab_size:,}, computing in {model.dtype}, for {own.target}",
        flush=True,
    )
    if own.decode:
        length = config.sequence_len
        found = plan_decoding(
            model, hardware, batch_size=config.batch_size, length=length, mesh=config.mesh
        )
        print(
            f"writing a token of {config.batch_size:,} rows in {length:,} positions, over", end=" "
        )
        print(f"{found.mesh}")
        _print(found)
        return found.fits
    found = plan_training(config, hardware)
    rows = config.accumulation * config.batch_size
    print(f"training on {rows:,} x {config.sequence_len:,} tokens a step, over {found.mesh}")
    _print(found)
    if own.quick:
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
        print("no remat, batch or optimizer makes it fit on this target")
    if hardware.chip is not None and not found.compiled:
        least = least_chips(config, hardware)
        if least is not None:
            print(f"state and gradients alone   fit when split by --mesh fsdp={least}")
    return False


def _print(found: Plan) -> None:
    """Print the memory of a chip by kind, and the least time of a step."""
    memory, hardware = found.memory, found.hardware
    chip = "this machine" if hardware.chip is None else f"a chip ({hardware.chip.name})"
    unknown = not found.compiled
    kinds = [
        ("parameters", memory.parameters), ("optimizer", memory.optimizer), ("cache", found.cache),
        ("inputs", memory.inputs),
        ("gradients" if unknown else "gradients and activations", memory.working),
    ]  # fmt: skip
    if found.cache:
        kinds[-1] = "activations", memory.working
    print(f"memory of {chip}, GiB")
    for kind, size in kinds:
        if size:
            print(f"  {kind:26} {size / GIB:9.3f}")
    sign = "fits" if found.fits else "does not fit"
    more = " and more: not compiled" if unknown else ""
    there = hardware.memory / GIB
    print(f"  {'all':26} {found.total / GIB:9.3f}{more} of {there:.3f}: {sign}")
    print(f"operations of a token       {found.flops / found.tokens / 1e9:9.3f} GFLOP")
    bounds = found.bounds
    if bounds is not None:
        network = "not known (this jaxlib cannot read the program)"
        if bounds.network is not None:
            network = _time(bounds.network)
        print(
            f"least time of a step        compute {_time(bounds.compute)}, "
            f"memory {_time(bounds.memory)}, network {network}"
        )
        rate = found.tokens / bounds.least
        chips = "1 chip" if hardware.count == 1 else f"{hardware.count} chips"
        print(f"so at most                  {rate:,.0f} tokens/s on {chips}")
        if found.traffic is not None and found.traffic.unknown_loops:
            print(f"network: {found.traffic.unknown_loops} collectives in loops of unknown length")
    elif hardware.chip is None:
        print("least time of a step        not known: no peak of this machine is published")


def _time(seconds: float) -> str:
    return f"{seconds:,.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
