"""Tests of LoRA: formulas against NumPy, training, and files in PEFT's format.

tests/pretrained/test_peft.py compares with PEFT itself.
"""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support.tolerances import assert_near, assert_same_bits
from transformer_jax.checkpoints.checkpoint import CheckpointError
from transformer_jax.config import ConfigError, LoraConfig, ModelConfig
from transformer_jax.models.factory import build, init_params
from transformer_jax.models.lora import (
    apply_lora,
    flatten,
    init_lora,
    lora_loss,
    matrices,
    merge_lora,
)
from transformer_jax.models.stack import stack_layers
from transformer_jax.pretrained.peft import InterleavedKernels, load_lora, save_lora
from transformer_jax.training.batch import Batch, batch_loss
from transformer_jax.training.step import make_train_step, start_state

safetensors = pytest.importorskip("safetensors.numpy")

pytestmark = pytest.mark.usefixtures("quick_compilation")

D, N, K, H, HV, F = 14, 4, 2, 6, 3, 19
MODEL = ModelConfig(
    vocab_size=23, d_model=D, num_layers=2, num_heads=N, num_kv_heads=K, head_dim=H,
    value_head_dim=HV, d_ff=F, max_len=17, positions="rope", glu=True, init_std=0.3,
)  # fmt: skip
SHAPES = {  # (inputs, outputs)
    "attention/query": (D, N * H),
    "attention/key": (D, K * H),
    "attention/value": (D, K * HV),
    "attention/out": (N * HV, D),
    "feed_forward/up": (D, F),
    "feed_forward/gate": (D, F),
    "feed_forward/down": (F, D),
}
ALL = LoraConfig(rank=3, alpha=5.0, targets="all-linear")
TOKENS = np.random.default_rng(5).integers(0, 23, (2, 13), dtype=np.int32)


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(3)
    shapes = jax.eval_shape(lambda: init_params(MODEL, jax.random.key(3)))

    def draw(path, x):
        mean = 1.0 if "scale" in str(path[-1]) else 0.0
        return (mean + 0.3 * rng.normal(size=x.shape)).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def trained(params, config=ALL, seed=11):
    """Return adapters with nonzero A and B."""
    shapes = jax.eval_shape(lambda: init_lora(params, config, jax.random.key(0)))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: (0.2 * rng.normal(size=x.shape)).astype(x.dtype), shapes)


def matrix(path, kernel):
    """Return a kernel in float64 as [inputs, outputs]."""
    return np.asarray(kernel, np.float64).reshape(SHAPES[path.split("/", 2)[2]])


def kernel(params, path):
    for name in path.split("/"):
        params = params[name]
    return params["kernel"]


@pytest.mark.slow
def test_fresh_adapters_do_not_change_model(params):
    adapters = init_lora(params, ALL, jax.random.key(1))
    adapted = apply_lora(params, adapters, ALL)
    jax.tree.map(assert_same_bits, adapted, params)
    looped = flatten(adapters)
    assert {path: x["a"].shape for path, x in looped.items()} == {
        f"decoder/block_{i}/{path}": (inputs, 3)
        for i in range(2)
        for path, (inputs, _) in SHAPES.items()
    }
    for path, x in looped.items():
        inputs, outputs = SHAPES[path.split("/", 2)[2]]
        assert x["b"].shape == (3, outputs) and not np.any(x["b"])
        assert 0.7 * inputs**-0.5 < np.abs(x["a"]).max() <= inputs**-0.5
        assert abs(np.mean(x["a"])) < 0.4 * inputs**-0.5
    assert len({x["a"].tobytes() for x in map(jax.device_get, looped.values())}) == 14


@pytest.mark.slow
def test_scanned_and_looped_stacks_have_same_adapters(params):
    stacked = stack_layers(params)
    shapes = jax.eval_shape(lambda: stacked)
    looped, *others = (init_lora(x, ALL, jax.random.key(1)) for x in (params, stacked, shapes))
    for fresh in others:
        jax.tree.map(assert_same_bits, fresh, stack_layers(looped))
    adapters = trained(params)
    adapted = apply_lora(stacked, stack_layers(adapters), ALL)
    jax.tree.map(assert_same_bits, adapted, stack_layers(apply_lora(params, adapters, ALL)))


@pytest.mark.slow_except("True")
@pytest.mark.parametrize("rslora", [False, True])
def test_adapted_kernel_adds_scaled_low_rank_product(params, rslora):
    config = dataclasses.replace(ALL, rslora=rslora)
    adapters = trained(params, config)

    @jax.jit
    def adapt(params, adapters):
        adapted = apply_lora(params, adapters, config)
        biases = (x["decoder"]["block_0"]["attention"]["query"]["bias"] for x in (params, adapted))
        assert next(biases) is next(biases), "parameters without adapters are returned as they are"
        return adapted

    adapted = adapt(params, adapters)
    scale = 5.0 / 3**0.5 if rslora else 5.0 / 3
    for path, x in flatten(adapters).items():
        a, b = np.asarray(x["a"], np.float64), np.asarray(x["b"], np.float64)
        expected = matrix(path, kernel(params, path)) + scale * a @ b
        assert_near(matrix(path, kernel(adapted, path)), expected, 1e-6, path)


@pytest.mark.long
def test_adapter_gradients_follow_chain_rule(params):
    """dA = s G B^T and dB = s A^T G, where G is the gradient of the adapted kernel."""
    decoder = {name: params["decoder"][name] for name in ("block_0", "norm")}
    params = {**params, "decoder": decoder}
    model = build(dataclasses.replace(MODEL, num_layers=1))
    adapters = trained(params)

    def loss(params):
        return jnp.square(model.apply({"params": params}, TOKENS)[0]).mean()

    full = jax.jit(jax.grad(loss))(apply_lora(params, adapters, ALL))
    found = jax.jit(jax.grad(lambda adapters: loss(apply_lora(params, adapters, ALL))))(adapters)
    flat = flatten(adapters)
    for path, gradient in flatten(found).items():
        g = (5.0 / 3) * matrix(path, kernel(full, path))
        a, b = (np.asarray(flat[path][x], np.float64) for x in "ab")
        assert_near(gradient["a"], g @ b.T, 1e-5, f"{path} a")
        assert_near(gradient["b"], a.T @ g, 1e-5, f"{path} b")


@pytest.mark.slow
@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.long), True])
def test_training_updates_only_adapters(params, scan):
    config = dataclasses.replace(MODEL, scan_layers=scan)
    lora = LoraConfig(rank=2, alpha=8.0, targets=("query", "up"), layers=(1,))
    params = jax.tree.map(jnp.copy, stack_layers(params) if scan else params)
    before = jax.tree.map(np.array, params)
    optimizer = optax.adamw(0.05, weight_decay=0.01)
    adapters = init_lora(params, lora, jax.random.key(1))
    state = start_state(adapters, optimizer, jax.random.key(2))
    step = make_train_step(lora_loss(batch_loss(config), lora), optimizer)
    batch = Batch(TOKENS[None, :, :-1], TOKENS[None, :, 1:])
    losses = []
    for _ in range(12):
        state, metrics = step(state, batch, frozen=(params,))
        losses.append(float(metrics.loss))
    assert losses[-1] < 0.8 * losses[0], losses
    jax.tree.map(assert_same_bits, params, before)
    looped = flatten(state.params)
    moved = {path for path, x in looped.items() if np.any(x["b"])}
    assert moved == {"decoder/block_1/attention/query", "decoder/block_1/feed_forward/up"}
    still = {path for path, x in looped.items() if not np.any(x["a"]) and not np.any(x["b"])}
    assert still == ({path.replace("block_1", "block_0") for path in moved} if scan else set())


@pytest.mark.slow
def test_merging_adapters_preserves_dtype_and_rounds_once(params):
    adapters = trained(params)
    merged = merge_lora(params, adapters, ALL)
    jax.tree.map(assert_same_bits, merged, apply_lora(params, adapters, ALL))
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    merged = merge_lora(low, adapters, ALL)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(merged)} == {"bfloat16"}
    for path, x in flatten(adapters).items():
        a, b = np.asarray(x["a"], np.float64), np.asarray(x["b"], np.float64)
        exact = matrix(path, kernel(low, path)) + (5.0 / 3) * a @ b
        error = np.abs(matrix(path, kernel(merged, path)) - exact)
        # one rounding to 8 significant bits
        assert (error <= 2.0**-8 * np.abs(exact) + 1e-6).all(), path
        summed = matrix(path, kernel(apply_lora(low, adapters, ALL), path))
        assert_near(summed, exact, 1e-6, path)


def test_adapter_targets_match_path_suffixes(params):
    def chosen(*targets, layers=None):
        config = LoraConfig(targets=targets, layers=layers)
        return set(flatten(jax.eval_shape(lambda: init_lora(params, config, jax.random.key(0)))))

    both = {f"decoder/block_{i}/attention/query" for i in range(2)}
    assert chosen("query") == chosen("attention/query") == both
    second = both - chosen("decoder/block_0/attention/query")
    assert chosen("query", layers=(1,)) == chosen("block_1/attention/query") == second


CONFIG_ERRORS = [
    (dict(rank=0), "rank is 0"), (dict(rank=2.5), "rank is 2.5"),
    (dict(alpha=-1.0), "alpha is -1.0"), (dict(targets=()), "targets is ()"),
    (dict(targets="query"), "targets is 'query'"),
    (dict(targets=("query", "")), "targets is ('query', '')"), (dict(layers=()), "layers is ()"),
    (dict(layers=(1, 1)), "layers is (1, 1)"), (dict(layers=(-1,)), "layers is (-1,)"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), CONFIG_ERRORS, ids=lambda x: str(x))
def test_invalid_lora_config_raises_error(fields, message):
    with pytest.raises(ConfigError) as error:
        LoraConfig(**fields)
    assert str(error.value).startswith(message + ":")


def test_adapters_that_do_not_match_parameters_raise_error(params):
    key = jax.random.key(0)
    with pytest.raises(ConfigError, match=r"targets contains 'uery'.*attention/key, attention/out"):
        init_lora(params, LoraConfig(targets=("query", "uery")), key)
    with pytest.raises(ConfigError, match=r"layers is \(2,\): the stacks have 2 blocks"):
        init_lora(params, LoraConfig(layers=(0, 2)[1:]), key)
    with pytest.raises(ConfigError, match="no block with a kernel"):
        init_lora({"embed": params["embed"]}, ALL, key)
    adapters = trained(params)
    with pytest.raises(ValueError, match="decoder/block_0: the parameters have no such module"):
        apply_lora(jax.eval_shape(stack_layers, params), adapters, ALL)
    with pytest.raises(ValueError, match=r"block_0/attention/key has a \(14, 3\) and b \(3, 12\)"):
        apply_lora(params, adapters, dataclasses.replace(ALL, rank=2))
    wrong = {"decoder": {"norm": {"a": np.ones((2, 3)), "b": np.ones((3, 2))}}}
    with pytest.raises(ValueError, match="decoder/norm: the parameters have no kernel"):
        apply_lora(params, wrong, ALL)


# Files in PEFT's format

THEIRS = {
    "attention/query": "self_attn.q_proj", "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj", "attention/out": "self_attn.o_proj",
    "feed_forward/up": "mlp.up_proj", "feed_forward/gate": "mlp.gate_proj",
    "feed_forward/down": "mlp.down_proj",
}  # fmt: skip
NAMES = {
    f"model.layers.{i}.{theirs}.weight": (f"decoder/block_{i}/{ours}/kernel",)
    for i in range(2)
    for ours, theirs in THEIRS.items()
} | {"model.norm.weight": ("decoder/norm/scale",)}
FUSED = {
    f"transformer.h.{i}.attn.c_attn.weight": tuple(
        f"decoder/block_{i}/attention/{name}/kernel" for name in ("query", "key", "value")
    )
    for i in range(2)
} | {
    f"transformer.h.{i}.{theirs}.weight": (f"decoder/block_{i}/{ours}/kernel",)
    for i in range(2)
    for ours, theirs in {"attention/out": "attn.c_proj", "feed_forward/down": "mlp.c_proj"}.items()
}
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def deltas(params, adapters, config):
    """Return the change of each adapted kernel in float64."""
    found = {}
    for path, x in flatten(adapters).items():
        a, b = np.asarray(x["a"], np.float64), np.asarray(x["b"], np.float64)
        if np.any(a @ b):
            found[path] = config.scale * a @ b
    return found


def test_saved_adapters_have_peft_layout(params, tmp_path):
    config = LoraConfig(rank=3, alpha=6.0, targets=("query", "down"))
    adapters = trained(params, config)
    save_lora(tmp_path, params, adapters, config, NAMES, base_model="tiny")
    content = json.loads((tmp_path / "adapter_config.json").read_text())
    assert content["target_modules"] == ["down_proj", "q_proj"]
    expected = dict(
        peft_type="LORA", r=3, lora_alpha=6, bias="none", task_type="CAUSAL_LM", use_rslora=False,
        base_model_name_or_path="tiny", fan_in_fan_out=False,
    )  # fmt: skip
    assert content | expected == content
    tensors = safetensors.load_file(tmp_path / "adapter_model.safetensors")
    assert {name: x.shape for name, x in tensors.items()} == {
        f"base_model.model.model.layers.{i}.{module}.lora_{x}.weight": shape
        for i in range(2)
        for module, x, shape in (
            ("self_attn.q_proj", "A", (3, D)),
            ("self_attn.q_proj", "B", (N * H, 3)),
            ("mlp.down_proj", "A", (3, F)),
            ("mlp.down_proj", "B", (D, 3)),
        )
    }
    query = adapters["decoder"]["block_0"]["attention"]["query"]
    assert_same_bits(tensors[f"{Q}.lora_A.weight"], np.asarray(query["a"]).T)
    assert_same_bits(tensors[f"{Q}.lora_B.weight"], np.asarray(query["b"]).T)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(rank=3, alpha=2.5, targets=("query", "value")),
        LoraConfig(rank=2, targets=("down", "gate"), layers=(1,), rslora=True),
        LoraConfig(rank=2, targets=("block_0/attention/key", "block_1/attention/out")),
    ],
    ids=["two", "a layer", "mixed"],
)
def test_saved_adapters_round_trip_in_looped_and_scanned_stacks(params, tmp_path, config):
    adapters = trained(params, config)
    assert save_lora(tmp_path, params, adapters, config, NAMES) == config
    loaded, again = load_lora(tmp_path, params, NAMES)
    assert loaded == config
    jax.tree.map(assert_same_bits, again, adapters)
    stacked = stack_layers(params)
    loaded, again = load_lora(tmp_path, jax.eval_shape(lambda: stacked), NAMES)
    assert loaded == config
    looped = flatten(again)
    for path, adapter in flatten(adapters).items():
        jax.tree.map(assert_same_bits, looped.pop(path), adapter)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(looped))
    adapted = stack_layers(apply_lora(params, adapters, config))
    jax.tree.map(assert_same_bits, apply_lora(stacked, again, config), adapted)
    save_lora(tmp_path / "again", stacked, again, config, NAMES)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_interleaved_qkv_adapters_round_trip(params, tmp_path):
    """GPT-NeoX stores query, key and value of head 0, then those of head 1, and so on."""
    config = LoraConfig(rank=2, alpha=3.0, targets=("query", "key", "value"), layers=(0,))
    adapters = trained(params, config)
    shapes = params["decoder"]["block_0"]["attention"]
    kinds = ("query", "key", "value")
    runs = shapes["key"]["kernel"].shape[1]
    paths = [f"decoder/block_0/attention/{name}" for name in kinds]
    names = {"layers.0.qkv.weight": InterleavedKernels([f"{path}/kernel" for path in paths], runs)}
    save_lora(tmp_path, params, adapters, config, names)
    file = safetensors.load_file(tmp_path / "adapter_model.safetensors")
    a, b = (file[f"base_model.model.layers.0.qkv.lora_{x}.weight"] for x in "AB")
    own = [deltas(params, adapters, config)[path] for path in paths]
    outputs = [np.asarray(x).reshape(len(x), runs, -1) for x in own]
    want = np.concatenate(outputs, axis=2).reshape(len(own[0]), -1)
    assert_near((b @ a).T * config.alpha / config.rank, want, 1e-6)
    loaded, again = load_lora(tmp_path, params, names)
    given = deltas(params, again, loaded)
    for path, delta in zip(paths, own, strict=True):
        assert_near(given[path], delta, 1e-6, path)


@pytest.mark.slow_except("True")
@pytest.mark.parametrize("rslora", [False, True])
def test_fused_weight_combines_different_adapters(params, tmp_path, rslora):
    config = LoraConfig(rank=2, alpha=3.0, targets=("query", "value", "out"), rslora=rslora)
    adapters = trained(params, config)
    written = save_lora(tmp_path, params, adapters, config, FUSED, fan_in_fan_out=True)
    assert written.rank == 4
    content = json.loads((tmp_path / "adapter_config.json").read_text())
    assert content["target_modules"] == ["attn.c_attn", "attn.c_proj"]
    loaded, again = load_lora(tmp_path, params, FUSED)
    assert loaded == written and loaded.targets == ("key", "out", "query", "value")
    wanted, given = deltas(params, adapters, config), deltas(params, again, loaded)
    assert wanted.keys() == given.keys()
    for path in wanted:
        assert_near(given[path], wanted[path], 1e-6, path)
    # Equal As, as after loading, are stored once, so the files do not grow.
    twice = save_lora(tmp_path / "again", params, again, loaded, FUSED, fan_in_fan_out=True)
    assert twice == written
    name = "adapter_model.safetensors"
    assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_saving_unsupported_adapters_raises_error(params, tmp_path):
    adapters = trained(params)
    with pytest.raises(ValueError, match=r"block_0/feed_forward/gate.* no weight in names"):
        save_lora(tmp_path, params, adapters, ALL, FUSED)
    with pytest.raises(ValueError, match="for rank 2"):
        save_lora(tmp_path, params, adapters, dataclasses.replace(ALL, rank=2), NAMES)
    with pytest.raises(ValueError, match="nothing to save"):
        save_lora(tmp_path, params, jax.tree.map(np.zeros_like, adapters), ALL, NAMES)
    with pytest.raises(ValueError, match="names contain decoder/block_7/x/kernel, which is"):
        save_lora(tmp_path, params, adapters, ALL, {"x.weight": ("decoder/block_7/x/kernel",)})
    assert not list(tmp_path.iterdir())


def test_existing_adapter_is_replaced_only_with_overwrite(params, tmp_path):
    config = LoraConfig(rank=2, targets=("query",))
    first, second = trained(params, config), trained(params, dataclasses.replace(config, rank=3))
    (tmp_path / "README.md").write_text("mine")
    save_lora(tmp_path, params, first, config, NAMES)
    again = dataclasses.replace(config, rank=3)
    with pytest.raises(CheckpointError, match=r"contains adapter_config\.json: pass overwrite"):
        save_lora(tmp_path, params, second, again, NAMES)
    assert load_lora(tmp_path, params, NAMES)[0] == config
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"already contains adapter_model\.safetensors: pass"):
        save_lora(tmp_path, params, second, again, NAMES)
    save_lora(tmp_path, params, second, again, NAMES, overwrite=True)
    assert load_lora(tmp_path, params, NAMES)[0] == again
    assert (tmp_path / "README.md").read_text() == "mine"


@pytest.fixture(scope="module")
def written(params, tmp_path_factory):
    folder, config = tmp_path_factory.mktemp("lora"), LoraConfig(rank=2, targets=("query", "value"))
    save_lora(folder, params, trained(params, config), config, NAMES)
    return folder


@pytest.fixture
def saved(written, tmp_path):
    return shutil.copytree(written, tmp_path, dirs_exist_ok=True)


def refused(folder, params):
    """Return the error message of loading a folder."""
    with pytest.raises(CheckpointError) as error:
        load_lora(folder, params, NAMES)
    return str(error.value)


def changed(folder, **changes):
    """Change keys of an adapter's config file; return its path."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return file


KEYS = [
    ("peft_type", "IA3"), ("peft_type", None), ("r", 0), ("r", True), ("r", "8"),
    ("lora_alpha", -1), ("lora_alpha", [1]), ("use_rslora", 1), ("bias", "all"),
    ("fan_in_fan_out", "yes"), ("init_lora_weights", "pissa_niter_4"), ("init_lora_weights", []),
    ("modules_to_save", ["lm_head"]), ("use_dora", True), ("rank_pattern", {"q_proj": 4}),
    ("alpha_pattern", {"q_proj": 4}), ("layers_pattern", "blocks"),
    ("layer_replication", [[0, 1]]), ("target_parameters", ["x"]),
    ("trainable_token_indices", [1]), ("lora_bias", True), ("what_nobody_knows", 1),
    ("target_modules", [1]), ("layers_to_transform", ["0"]), ("exclude_modules", {"a": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), KEYS, ids=lambda x: str(x))
def test_unsupported_config_key_error_names_key(saved, params, key, value):
    file = changed(saved, **{key: value})
    line = refused(saved, params)
    assert line.startswith(f"{file}: {key}") and "\n" not in line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(target_modules=["q_proj"]), "has an adapter for model.layers.0.self_attn.v_proj"),
        (dict(target_modules=["q_proj", "v_proj", "up_proj"]), "lacks an adapter for model.layers"),
        (dict(layers_to_transform=1), "has an adapter for model.layers.0.self_attn.q_proj"),
        (dict(exclude_modules=["v_proj"]), "has an adapter for model.layers.0.self_attn.v_proj"),
        (dict(r=3), "q_proj.lora_A.weight has shape [2, 14]: must be [3, 14]"),
    ],
    ids=lambda x: str(x),
)
def test_config_that_contradicts_tensors_raises_error(saved, params, changes, message):
    changed(saved, **changes)
    assert message in refused(saved, params)


def test_config_keys_with_neutral_values_are_ignored(saved, params):
    expected = load_lora(saved, params, NAMES)
    changed(
        saved, use_dora=False, rank_pattern={}, loftq_config={}, layers_to_transform=[0, 1],
        modules_to_save=None, target_modules=".*[qv]_proj", fan_in_fan_out=True, lora_dropout=0.1,
    )  # fmt: skip
    config, adapters = load_lora(saved, params, NAMES)
    assert config == expected[0]
    jax.tree.map(assert_same_bits, adapters, expected[1])


GOOD = b'{"peft_type": "LORA", "r": 2, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]'
TEXTS = {
    "no JSON": b"{", "no object": b"[1]", "NaN": GOOD + b', "lora_dropout": NaN}',
    "twice": GOOD + b', "r": 2}', "deep": b"[" * 200_000,
    "no UTF-8": GOOD + b', "revision": "\xff"}', "long": GOOD + b"}" + b" " * 2**20,
    "a long number": GOOD + b', "lora_dropout": ' + b"9" * 10_000 + b"}",
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_damaged_adapter_config_raises_error(saved, params, text):
    file = saved / "adapter_config.json"
    file.write_bytes(GOOD + b"}")
    load_lora(saved, params, NAMES)
    file.write_bytes(text)
    line = refused(saved, params)
    assert line.startswith(f"{file}") and len(line) < 400


@pytest.mark.slow
def test_damaged_tensor_error_names_tensor(saved, params):
    file = saved / "adapter_model.safetensors"
    whole, tensors = file.read_bytes(), safetensors.load_file(file)
    a, b = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"

    def check(message, **changes):
        if changes:
            named = {"a": a, "b": b}
            new = tensors | {named.get(name, name): value for name, value in changes.items()}
            safetensors.save_file({n: x for n, x in new.items() if x is not None}, file)
        line = refused(saved, params)
        assert line.startswith(f"{file}") and message in line

    check(f"{b} is missing", b=None)
    line = f"{a} has shape [14, 2]: must be [2, 14] for rank 2 and these parameters"
    check(line, a=tensors[a].T.copy())
    check(f"{b} has dtype I32: must be F32, F16, or BF16", b=np.ones((24, 2), np.int32))
    other = "base_model.model.lm_head.lora_A.weight"
    check(f"{other} matches no kernel in names", **{other: np.ones((2, 14), np.float32)})
    resized = "base_model.model.model.embed_tokens.weight"  # PEFT saves resized embeddings
    check(
        f"{resized} is a whole tensor, such as a resized embedding: merge",
        **{resized: np.ones((31, 14), np.float32)},
    )
    safetensors.save_file({}, file)
    check("contains no adapter")
    for damaged in (whole[:-1], whole[:50], b"", (2**60).to_bytes(8, "little") + whole[8:]):
        file.write_bytes(damaged)
        check("cannot be read")
    file.unlink()
    check("the file does not exist")
    (saved / "adapter_model.bin").write_bytes(b"cos\nsystem\n")
    check("adapter_model.bin is a pickle")


@pytest.mark.slow
def test_adapter_target_search_finds_exactly_all_kernels(params):
    assert matrices(params) == {
        f"decoder/block_{i}/{path}": shape for i in range(2) for path, shape in SHAPES.items()
    }
    t5 = dataclasses.replace(MODEL, kind="encoder-decoder", num_layers=1, scan_layers=True)
    found = matrices(jax.eval_shape(lambda: init_params(t5, jax.random.key(0))))
    assert found["decoder/block_0/cross_attention/out"] == (N * HV, D)
    assert found["encoder/block_0/attention/out"] == (N * HV, D)
    assert len(found) == 18
