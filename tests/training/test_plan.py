"""Plans of steps: counts against closed forms, and programs for devices that are not attached."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters.partial_eval import dce_jaxpr

from tests.support.devices import on_devices
from transformer_jax.cli.plan import main
from transformer_jax.config import (
    AdamW,
    ConfigError,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
    preset,
)
from transformer_jax.models import flops
from transformer_jax.models.factory import build, cache_bytes, init_params, num_params
from transformer_jax.models.flops import forward_flops, training_flops
from transformer_jax.models.lora import join_parts, split_frozen, split_trained
from transformer_jax.training.optimizers import is_frozen
from transformer_jax.training.phases import flops_utilisation
from transformer_jax.training.planning import hardware, memory
from transformer_jax.training.planning.hardware import Hardware, find_hardware
from transformer_jax.training.planning.network import network_traffic
from transformer_jax.training.planning.peaks import CHIPS, chip_of
from transformer_jax.training.planning.plan import (
    largest_batch,
    least_chips,
    plan_decoding,
    plan_training,
    remedies,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = ModelConfig(vocab_size=61, d_model=32, num_heads=4, num_layers=2, max_len=16, d_ff=48)
RUN = TrainConfig(model=SMALL, batch_size=4)
CPU = Hardware("cpu", None, 1)


@pytest.mark.slow
def test_flop_count_matches_closed_form():
    """Llama 3 8B: 2 x (parameters without the input table) per token, plus causal attention."""
    config, length = preset("llama3-8b"), 4096
    table = config.vocab_size * config.d_model
    norms = (2 * config.num_layers + 1) * config.d_model
    matrices = num_params(config) - table - norms
    pairs = length * (length + 1) / 2
    attention = config.num_layers * pairs * config.num_heads * 4 * config.key_dim
    assert forward_flops(config, length) == 2 * matrices * length + attention
    assert training_flops(config, length) == 3 * forward_flops(config, length)


def brute(config, length, source=0):
    """Count the multiplications and additions of one sequence by brute force."""
    d, n, k, h, f = (
        config.d_model,
        config.num_heads,
        config.kv_heads,
        config.key_dim,
        config.ff_dim,
    )

    def block(queries, keys, pairs, window=None):
        projections = 2 * d * n * h * queries * 2 + 2 * 2 * d * k * h * keys
        return projections + 4 * n * h * pairs

    feed = 2 * d * f * (3 if config.glu else 2)  # 0 if f is 0

    def seen(size, window, causal):
        reach = size if window is None else window
        return sum(
            1
            for q in range(size)
            for s in range(size)
            if ((q - reach < s <= q or s < min(config.sink_tokens, q)) and causal)
            or (not causal and abs(q - s) < reach)
        )

    total = 2 * config.vocab_size * d * length
    if config.kind == "encoder-decoder":
        for _ in range(config.num_layers):
            total += block(source, source, source**2) + feed * source
        for _ in range(config.decoder_layers):
            total += block(length, length, seen(length, None, True)) + feed * length
            total += block(length, source, length * source)
        return total
    causal = config.kind == "decoder"
    for i in range(config.num_layers):
        window = config.windows[i % len(config.windows)]
        total += block(length, length, seen(length, window, causal)) + feed * length
    return total


@pytest.mark.parametrize(
    "config",
    [
        replace(SMALL, num_kv_heads=2, glu=True),
        replace(SMALL, window=(5, None)),
        replace(SMALL, window=4, sink_tokens=3),
        replace(SMALL, d_ff=0),
        replace(SMALL, kind="encoder", window=3),
        replace(SMALL, kind="encoder-decoder", num_decoder_layers=3, glu=True),
    ],
    ids=["decoder", "windows", "sinks", "attention alone", "encoder", "encoder-decoder"],
)
def test_flop_formula_matches_brute_force_count(config):
    source = 7 if config.kind == "encoder-decoder" else 0
    assert forward_flops(config, 11, source) == brute(config, 11, source)


def traced_products(jaxpr):
    """Count the multiplications and additions of matrix products in a jaxpr."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general" and min(v.aval.ndim for v in eqn.invars) > 1:
            contracted = eqn.params["dimension_numbers"][0][0]
            shape = eqn.invars[0].aval.shape
            total += 2 * eqn.outvars[0].aval.size * math.prod(shape[i] for i in contracted)
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for value in jax.tree.leaves(
            tuple(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            total += times * traced_products(inner) if hasattr(inner, "eqns") else 0
    return total


KERNELS = tuple(f"decoder/block_{i}/{b}" for i in range(2) for b in ("attention", "feed_forward"))
QUERY = "decoder/block_0/attention/query", "decoder/block_0/norm_attention"
FROZEN = dict(
    all_trained={},
    kernels=dict(frozen=KERNELS),
    embedding=dict(frozen=("embed",)),
    first_block=dict(frozen=("embed", "decoder/block_0")),
    part_of_a_block=dict(
        frozen=("embed", "decoder/block_0/attention/query", "decoder/block_0/norm_attention")
    ),
    adapters=dict(lora=LoraConfig(rank=3)),
    adapters_of_values=dict(lora=LoraConfig(rank=3, targets=("value",))),
    adapters_of_all=dict(lora=LoraConfig(rank=3, targets="all-linear")),
    adapters_of_one_block=dict(lora=LoraConfig(rank=3, targets=("up",), layers=(1,))),
    adapters_and_embedding=dict(lora=LoraConfig(rank=3, targets=("down",), trained=("embed",))),
)
OF_MODEL = dict(
    decoder=dict(),
    parallel=dict(norm_order="parallel", glu=True, tie_embeddings=False),
    post=dict(kind="encoder", norm_order="post"),
    pairs=dict(kind="encoder-decoder"),
    shared=dict(kind="encoder", share_layers=True),
)


@pytest.mark.slow_except("decoder-kernels", "parallel-part_of_a_block")
@pytest.mark.parametrize(
    ("kind", "case"),
    [("decoder", case) for case in FROZEN]
    + [
        (kind, case)
        for kind in OF_MODEL
        for case in ("all_trained", "part_of_a_block", "adapters_of_values")
        if kind != "decoder" and (kind, case) != ("shared", "adapters_of_values")
    ],
)
def test_flops_with_frozen_parameters_match_traced_products(monkeypatch, kind, case):
    """They are counted in the program of value and gradient, which multiplies every pair."""
    config = replace(SMALL, implementation="xla", **OF_MODEL[kind])
    stack = "encoder" if kind in ("post", "shared") else "decoder"
    options = {
        name: tuple(part.replace("decoder", stack) for part in value)
        if name == "frozen" else value for name, value in FROZEN[case].items()
    }  # fmt: skip
    monkeypatch.setattr(flops, "_pairs", lambda window, length, *_: length**2)
    tokens, source = jnp.ones((1, 7), int), jnp.ones((1, 5), int)
    read = dict(source=source) if kind == "pairs" else {}
    lora, names = options.get("lora"), options.get("frozen", ())
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    base = None if lora is None else jax.eval_shape(lambda p: split_frozen(p, lora), params)

    def loss(trained, base):
        if lora is not None:
            trained = join_parts(base, trained, lora)
        elif names:
            marked = is_frozen(names, trained)
            trained = jax.tree.map(
                lambda x, m: jax.lax.stop_gradient(x) if m else x, trained, marked
            )
        found = build(config).apply({"params": trained}, tokens, **read)
        return jnp.sum(found[0] if isinstance(found, tuple) else found)

    trained = params
    if lora is not None:
        trained = jax.eval_shape(lambda p: split_trained(p, lora, jax.random.key(0)), params)
    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(trained, base).jaxpr
    used, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    length = 5 if kind == "pairs" else 0
    found = training_flops(config, 7, length, **options)
    assert found == pytest.approx(traced_products(used), rel=1e-12)


def test_plan_excludes_gradients_for_frozen_parameters():
    model = ModelConfig(vocab_size=65, d_model=256, num_layers=4, num_heads=4, max_len=128)
    names = tuple(f"decoder/block_{i}/{b}" for i in range(4) for b in ("attention", "feed_forward"))
    run = TrainConfig(model=model, batch_size=4)
    adapted = replace(run, lora=LoraConfig(rank=8), init_from="x", tokenizer="pretrained")
    whole, frozen, lora = (
        plan_training(config, CPU, compiled=False)
        for config in (run, replace(run, frozen=names), adapted)
    )
    kernels = 4 * (4 + 8) * 256**2  # their gradients take one more product per token
    assert (whole.flops - frozen.flops) / whole.tokens == pytest.approx(2 * kernels, rel=0.01)
    assert lora.flops < frozen.flops  # the input of the first block has no gradient either
    assert flops_utilisation(adapted, 1e6, "NVIDIA H200", 1) == pytest.approx(
        1e6 * lora.flops / lora.tokens / CHIPS["h200"].flops
    )


HLO = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}

%body (p: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %g = bf16[64,16]{1,0} all-gather(%x), channel_id=3, replica_groups=[4,8]<=[32], dimensions={0}
  %again = bf16[64,16]{1,0} all-gather(%x), channel_id=3, replica_groups=[4,8]<=[32], dimensions={0}
}

%limit (p: (s32[], bf16[8,16])) -> pred[] {
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%all-reduce-scatter.1 (p: f32[32]) -> f32[4] {
  %r = f32[32]{0} all-reduce(%p), channel_id=4, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
}

%unused (p: f32[999]) -> f32[999] {
  %r = f32[999]{0} all-reduce(%p), channel_id=9, replica_groups={{0,1}}, to_apply=%add
}

ENTRY %main (p: f32[32]) -> f32[32] {
  %w = (s32[], bf16[8,16]) while(%t), condition=%limit, body=%body
  %f = f32[4]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
  %m = (f32[10], f32[6]) all-reduce(%a), channel_id=5, replica_groups=mesh['x'=2,'y'=3] {'y'}
}
"""


def test_communication_traffic_is_parsed_from_program_text():
    """A gather in a loop of five iterations, a scatter as TPUs write it, and two sums in one."""
    found = network_traffic(HLO, 32)
    assert found.unknown_loops == 0
    assert found.bytes == {
        "all-gather": 5 * 64 * 16 * 2 * 7 / 8,
        "reduce-scatter": 32 * 4 * 3 / 4,
        "all-reduce": 2 * 16 * 4 * 2 / 3,
    }
    open_ended = HLO.replace("%n = s32[] constant(5)", "%n = s32[] get-tuple-element(%p), index=0")
    assert network_traffic(open_ended, 32).unknown_loops == 2


def test_transfers_inside_shard_map_are_counted_separately():
    """JAX gives them the same channel."""
    line = (
        "  %{0} = f32[4,8]{{1,0}} collective-permute(%x), channel_id=1, "
        "source_target_pairs={{{{0,1}},{{1,0}}}}"
    )
    text = "ENTRY %main (x: f32[4,8]) -> f32[4,8] {\n"
    text += "\n".join(line.format(name) for name in ("a", "b", "c")) + "\n}"
    assert network_traffic(text, 2).bytes == {"collective-permute": 3 * 4 * 8 * 4}


@pytest.mark.parametrize(
    ("line", "sent"),
    [
        ("%g = (f32[8,4], f32[16,4]) all-gather-start(%x), replica_groups={{0,1}}", 256 / 2),
        (
            "%g = ((f32[8], f32[2]), (f32[16], f32[4])) all-gather-start(%x), "
            "replica_groups={{0,1}}",
            80 / 2,
        ),
        ("%g = f32[16,4] all-gather(%x), replica_groups={}", 256 * 3 / 4),
        ("%p = (f32[32], f32[32], u32[], u32[]) collective-permute-start(%x)", 128),
        ("%r = (f32[8], f32[8]) all-reduce-start(%x, %y), replica_groups={{0,1,2,3}}", 96),
        ("%s = f32[4] reduce-scatter(%x), replica_groups={{0,1,2,3}}", 48),
    ],
)
def test_asynchronous_collective_traffic_counts_only_result(line, sent):
    text = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n  {line}\n}}\n"
    assert network_traffic(text, 4).total == sent


@pytest.mark.long
def test_plan_for_this_machine_matches_step_of_run():
    plan = plan_training(RUN, CPU)
    size = 4 * num_params(SMALL)
    assert plan.memory.parameters == size
    assert plan.memory.optimizer == 2 * size + 2 * 4  # two moments, two counters
    assert plan.tokens == 4 * 16 and plan.flops == 4 * training_flops(SMALL, 16)
    assert plan.fits and plan.bounds is None and plan.cache == 0
    wider = plan_training(replace(RUN, batch_size=64), CPU)
    assert wider.memory.working > 4 * plan.memory.working
    halves = plan_training(replace(RUN, batch_size=64, accumulation=2), CPU)
    assert halves.tokens == 2 * wider.tokens
    assert halves.memory.working < 1.5 * wider.memory.working


@pytest.mark.slow
def test_decoding_plan_counts_cache_and_parameter_reads_once():
    with pytest.raises(ConfigError, match="mesh is context=2: context must be 1, because decoding"):
        plan_decoding(SMALL, CPU, batch_size=3, length=13, mesh=MeshConfig(context=2))
    plan = plan_decoding(SMALL, CPU, batch_size=3, length=13)
    assert plan.memory.parameters == 4 * num_params(SMALL)
    assert plan.cache == cache_bytes(SMALL, 3, 13)
    assert plan.memory.working < plan.memory.parameters
    # one token: the matrices once per row, and all keys of the cache
    matrices = 2 * (SMALL.num_layers * (4 * 32**2 + 2 * 32 * 48) + 61 * 32)
    assert plan.flops == 3 * (matrices + SMALL.num_layers * 13 * 4 * 32)


def test_lookup_table_is_not_counted_as_read():
    chip = replace(CHIPS["h200"], bandwidth=1.0)
    untied = replace(SMALL, tie_embeddings=False)
    tied, untied = (
        replace(
            plan_decoding(model, CPU, batch_size=3, length=13), hardware=replace(CPU, chip=chip)
        )
        for model in (SMALL, untied)
    )
    table = 4 * SMALL.vocab_size * SMALL.d_model
    assert untied.memory.parameters - tied.memory.parameters == table
    positions = 4 * SMALL.max_len * SMALL.d_model
    for plan in (tied, untied):
        moved = plan.bounds.memory - 2 * plan.memory.working
        assert moved == tied.memory.parameters - positions + tied.cache


@pytest.mark.slow
def test_oversized_state_is_not_compiled_and_remedies_are_listed():
    chip = replace(CHIPS["h200"], memory=11 * num_params(SMALL))
    hardware = replace(CPU, chip=chip)
    plan = plan_training(RUN, hardware)
    assert not plan.compiled and not plan.fits and plan.bounds is None
    assert plan.memory.working == plan.memory.parameters  # the gradients
    flags = [flags for flags, _ in remedies(RUN, hardware)]
    mild = "--remat full --scan-layers True --batch-size 1"
    assert flags == [f"{mild} --param-dtype bfloat16 --optimizer adafactor"]
    assert largest_batch(RUN, hardware, plan) is None
    # a chip has room for 11 of the 16 bytes per parameter
    assert least_chips(RUN, hardware) == 2
    # a width of 36 is replicated on each of 8 chips
    wide = replace(RUN, model=replace(SMALL, d_model=36), mesh=MeshConfig(fsdp=8), batch_size=8)
    resident = plan_training(wide, replace(hardware, count=8), compiled=False)
    assert resident.memory.parameters == 4 * num_params(wide.model)


def test_training_state_that_leaves_no_memory_for_gradients_is_rejected(monkeypatch):
    """AdamW takes 16 bytes per parameter: value, two moments and gradient."""
    shape = jax.ShapeDtypeStruct((7, 13), jnp.float32)
    state = SimpleNamespace(params=shape, opt_state=(shape, shape), average=None)
    monkeypatch.setattr(memory, "device_memory", lambda: 16 * 7 * 13)
    memory.check_state(state)
    monkeypatch.setattr(memory, "device_memory", lambda: 16 * 7 * 13 - 1)
    with pytest.raises(ConfigError, match="model has 91 parameters: needs"):
        memory.check_state(state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plan_assumes_float32_gradients(dtype):
    count = num_params(SMALL)
    resident = plan_training(replace(RUN, param_dtype=dtype), CPU, compiled=False).memory
    size = {"float32": 4, "bfloat16": 2}[dtype]
    moments, counters = 2 * 4 * count, 2 * 4
    assert (resident.parameters, resident.working) == (size * count, 4 * count)
    assert (resident.optimizer, resident.inputs) == (moments + counters, 0)


@pytest.mark.long
def test_largest_batch_fits_and_larger_one_does_not():
    run = replace(RUN, model=replace(SMALL, num_layers=1))
    first = plan_training(run, CPU)
    chip = replace(CHIPS["h200"], memory=3 * first.total)
    hardware = replace(CPU, chip=chip)
    size, plan = largest_batch(run, hardware, replace(first, hardware=hardware))
    assert plan.fits and plan.total <= chip.memory
    assert size > 4 and not plan_training(replace(run, batch_size=size * 5 // 4), hardware).fits


def test_hardware_names_are_parsed_and_unknown_names_rejected():
    assert find_hardware("tpu-v5e-256").count == 256
    assert find_hardware("tpu-v5p-8").count == 4  # eight cores
    assert find_hardware("h200-8") == Hardware("h200-8", CHIPS["h200"], 8)
    for name, rule in {
        "tpu-v5e-7": "N must be one of 1, 4, 8",
        "tpu-v5p-7": "N must be one of 2, 8",
        "tpu-v9-8": "must be cpu, h200",
        "h200-3": "N must be 1, 2, 4 or 8",
        "cpu-1000": "needs 1000 CPU devices",
        "cpu-0": "N must be at least 1",
        "cpu-²": "must be cpu, h200",
    }.items():
        with pytest.raises(ConfigError, match=f"target is '{name}': {rule}"):
            find_hardware(name)
    with pytest.raises(ConfigError, match="mesh is 'data=2': has 2 devices, but cpu has one chip"):
        plan_training(replace(RUN, mesh=MeshConfig(data=2)), CPU)


def test_chip_specifications_are_found_by_device_kind():
    assert chip_of("TPU v5 lite") is CHIPS["v5e"] and chip_of("TPU v5p") is CHIPS["v5p"]
    assert chip_of("NVIDIA H200") is CHIPS["h200"] and chip_of("cpu") is None


@pytest.mark.slow
def test_foreign_libtpu_lock_does_not_block_planning():
    pytest.importorskip("libtpu")
    code = (
        "import fcntl; file = open('/tmp/libtpu_lockfile', 'a'); fcntl.flock(file, fcntl.LOCK_EX)\n"
        "from transformer_jax.training.planning.hardware import find_hardware\n"
        "print(len(find_hardware('tpu-v5e-4').devices()))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "ALLOW_MULTIPLE_LIBTPU_LOAD"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr


def test_already_installed_package_is_not_suggested(monkeypatch):
    pytest.importorskip("libtpu")

    def broken(*args, **named):
        raise RuntimeError("broken")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", broken)
    with pytest.raises(ConfigError, match=r"libtpu is installed but cannot be used \(broken\)"):
        find_hardware("tpu-v5e-4").devices()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("usual_compilation")
def test_llama_3_8b_is_planned_for_256_unattached_chips():
    pytest.importorskip("libtpu")
    model = preset("llama3-8b", scan_layers=True, remat="full")
    mesh = MeshConfig(fsdp=64, tensor=4)
    config = TrainConfig(model=model, mesh=mesh, batch_size=64, context=4096, optimizer=AdamW())
    plan = plan_training(config, find_hardware("tpu-v5e-256"))
    assert plan.fits and plan.compiled
    assert plan.memory.parameters == pytest.approx(4 * num_params(model) / 256, rel=0.01)
    assert plan.memory.optimizer == pytest.approx(8 * num_params(model) / 256, rel=0.01)
    assert plan.bounds is not None and plan.bounds.compute == pytest.approx(0.251, rel=0.01)
    if plan.traffic is not None:
        # the matrices in bfloat16, forward and backward, and six sums of activations per layer
        matrices = 2 * (num_params(model) - 2 * 128256 * 4096) / 4
        assert plan.traffic.bytes["all-gather"] == pytest.approx(2 * matrices, rel=0.15)
        sums = 6 * 32 * 4096 * 4096 * 2 * 2 * 3 / 4
        assert plan.traffic.bytes["all-reduce"] == pytest.approx(sums, rel=0.1)


LENGTHS = """
import json
from dataclasses import replace
from transformer_jax.config import ModelConfig, TrainConfig
from transformer_jax.training.planning.hardware import find_hardware
from transformer_jax.training.planning.lengths import plan_lengths
from transformer_jax.training.planning.plan import plan_training
model = ModelConfig(
    vocab_size=64, max_len=256, num_layers=3, num_heads=4, num_kv_heads=2, d_model=32, d_ff=64,
    positions="rope", glu=True, norm="rmsnorm", implementation="blockwise", remat="full",
    scan_layers=True,
)
found = []
for window in (None, 40):
    config = TrainConfig(model=replace(model, window=window), context=256)
    for plan in plan_lengths(config, find_hardware("cpu-8"), 256):
        if plan.mesh.context == 4:
            run = replace(config, mesh=plan.mesh, batch_size=2)
            real = plan_training(run, plan.hardware)
            found.append([plan.ring, real.traffic.bytes["collective-permute"],
                          plan.memory.optimizer, real.memory.optimizer])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_formula_for_traffic_of_ring_matches_compiled_step():
    """The compiled step sends the positions of keys fewer times, because all layers share them."""
    for ring, sent, optimizer, stored in on_devices(8, "-c", LENGTHS, optimise=False):
        assert 0.98 * ring < sent <= ring and optimizer == stored


def test_table_of_lengths_marks_fastest_mesh_that_fits(capsys):
    argv = ["--target", "tpu-v5p-128,tpu-v5e-64", "--preset", "llama3-8b", "--lengths", "131072"]
    assert main(argv) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[4:]]
    assert [line[2:5] for line in lines[:7]] == [[str(64 >> n), "x", str(1 << n)] for n in range(7)]
    assert lines[0][-1] == "*" and sum("*" in line for line in lines) == 2
    memory = [float(line[5]) for line in lines[7:]]
    assert sorted(memory, reverse=True) == memory
    for line, size in zip(lines[7:], memory, strict=True):
        assert (line[-1] == "fit") == (size > 15.75)
    # each of 32 layers sends 3 blocks of 32,768 tokens: keys and values with 8 heads of 128 in
    # bfloat16 and positions, three times, and gradients in float32
    block = 32768 * (8 * 256 * 2 + 4) * 3 + 32768 * 8 * 256 * 4
    assert float(lines[2][6]) == pytest.approx(32 * 3 * block / 1e9, abs=0.05)
    assert main([*argv[:1], "tpu-v5p-128,cpu", *argv[2:]]) == 2
    printed = capsys.readouterr()
    assert not printed.out and "target is 'cpu': --lengths needs published peak" in printed.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--decode", "lengths is not supported with decode: the table compares all meshes"),
        ("--batch-size 4 --mesh data=2", "lengths is not supported with batch_size, mesh: "),
        ("--lora lora", "lengths is not supported with lora: "),
        ("--lengths 0", "lengths is 0: must be positive"),
    ],
)
def test_table_of_lengths_refuses_options_that_it_does_not_read(flags, message, capsys):
    start = ["--target", "tpu-v5p-8", "--preset", "llama3-8b", "--lengths", "131072"]
    assert main([*start, *flags.split()]) == 2
    printed = capsys.readouterr()
    assert not printed.out and message in printed.err and printed.err.count("\n") == 1


def test_odd_length_is_planned_without_split(capsys):
    argv = ["--target", "tpu-v5p-8", "--preset", "llama3-8b", "--lengths", "1001"]
    assert main(argv) == 0
    (line,) = capsys.readouterr().out.splitlines()[4:]
    assert line.split()[1:5] == ["1,001", "4", "x", "1"]


def test_library_output_to_standard_error_is_suppressed(capfd):
    with hardware._quiet():
        os.write(2, b"a library's words")
    os.write(2, b"ours")
    assert capfd.readouterr().err == "ours"


def test_chip_grids_have_stated_number_of_chips():
    for grids in hardware._GRIDS.values():
        for count, shape in grids.items():
            assert math.prod(map(int, shape.split("x"))) == count
            assert all(int(side).bit_count() == 1 for side in shape.split("x"))  # powers of two
