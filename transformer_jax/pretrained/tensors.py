"""Lookup of tensors in a published checkpoint by the names in its family's table.

Names from old files and from models that were saved without their head are translated. Names,
shapes and dtypes are checked against the config before any tensor is read.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import get_args

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from transformer_jax.config import ConfigError, DType, Learned, ModelConfig, Rope
from transformer_jax.models.factory import init_params
from transformer_jax.pretrained.config_json import written_family
from transformer_jax.pretrained.families import FAMILIES, Family, TensorMapping
from transformer_jax.pretrained.peft import InterleavedKernels
from transformer_jax.pretrained.safetensors_folder import CheckpointError, WeightFolder
from transformer_jax.pytree import cast, check_range

Shapes = Mapping[str, jax.ShapeDtypeStruct]
"""Shape of each parameter, keyed by path, such as "decoder/block_0/attention/query/kernel"."""

DTYPES: tuple[DType, ...] = get_args(DType)
"""Dtypes that parameters can have."""


def parameter_shapes(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape of every parameter of a looped model, keyed by path.

    No memory is allocated for parameters. Only one block per stack, mixer and kind of
    feed-forward network is traced, because such blocks have the same parameters, except that the
    first block may lack a norm.
    """
    kind_of = lambda i: (config.mixer(i), config.has_experts(i))  # noqa: E731
    kinds = list(dict.fromkeys(map(kind_of, range(config.num_layers))))
    mixers, experts = tuple(mixer for mixer, _ in kinds), config.experts
    if experts is not None:
        dense = sum(not routed for _, routed in kinds)
        experts = dataclasses.replace(experts, dense_layers=dense)
    # Remove patterns over layers, which do not fit a one-layer model and do not affect shapes.
    positions = config.positions
    if isinstance(positions, Rope):
        positions = dataclasses.replace(positions, window_base=None, pattern=None)
    one = dataclasses.replace(
        config, num_layers=len(kinds), mixers=None if config.mixers is None else mixers,
        num_decoder_layers=None, scan_layers=False, first_norm=True, window=None,
        positions=positions, sink_tokens=0, experts=experts,
    )  # fmt: skip
    tree = jax.eval_shape(partial(init_params, one), jax.random.key(0))
    found: dict[str, jax.ShapeDtypeStruct] = {}
    for path, shape in flatten_dict(tree, sep="/").items():
        if (block := scanned_path(path)) is None:
            found[path] = shape
            continue
        depth = config.decoder_layers if path.startswith("decoder/") else config.num_layers
        lacking = not config.first_norm and "/norm_attention/" in path
        for i in range(lacking, 1 if config.share_layers else depth):
            if kind_of(i) == kinds[block[1]]:
                found[block[0].replace("/blocks/", f"/block_{i}/")] = shape
    return found


def table_shapes(shapes: Shapes, listed: Collection[str]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of parameters, keyed by the paths in the table of a family.

    "decoder/block_0/feed_forward/up/kernel" with shape [E, D, F] becomes E paths that end with
    "kernel/0", "kernel/1", ... if `listed` contains these paths.
    """
    found: dict[str, jax.ShapeDtypeStruct] = {}
    for path, shape in shapes.items():
        if f"{path}/0" in listed:
            one = jax.ShapeDtypeStruct(shape.shape[1:], shape.dtype)
            found |= {f"{path}/{e}": one for e in range(shape.shape[0])}
        else:
            found[path] = shape
    return found


def whole_path(path: str, *, scanned: bool) -> tuple[str, tuple[int, ...]]:
    """Return the parameter that contains a path from `table_shapes`, and the index within it.

    In a scanned stack, the layer is the first index, followed by the expert:
    "decoder/block_3/.../up/kernel/5" becomes ("decoder/blocks/.../up/kernel", (3, 5)).
    """
    index: tuple[int, ...] = ()
    name, _, last = path.rpartition("/")
    if last.isdigit():
        path, index = name, (int(last),)
    if scanned and (found := scanned_path(path)) is not None:
        path, index = found[0], (found[1], *index)
    return path, index


def tensor_names(
    config: ModelConfig, family: str | None = None, *, bare: bool = False
) -> dict[str, tuple[str, ...]]:
    """Return the paths of the parameters in each tensor of a published checkpoint, keyed by name.

    If a tensor contains several parameters, their paths are in the order of its rows, as required
    by `save_lora` and `load_lora`. `peft.InterleavedKernels` marks interleaved rows.

    Args:
        config: the model config.
        family: a `model_type`. None selects the first family that can express the config.
        bare: whether to use the tensor names of a model without its head, such as `BertModel`:
            "encoder.layer.0..." instead of "bert.encoder.layer.0...".
    """
    chosen = FAMILIES[written_family(config, family)]
    names: dict[str, InterleavedKernels] = {}
    for mapping in chosen.table(config):
        name = mapping.tensor
        if bare and _matches(name, chosen.head_tensors):
            continue
        name = name.removeprefix(chosen.prefix) if bare else name
        runs = 1 if mapping.layout.rows is None else mapping.layout.rows.groups
        renamed_by = chosen.name if chosen.renames_modules else ""
        names[name] = InterleavedKernels((*names.get(name, ()), mapping.param), runs, renamed_by)
    return dict(names)


def scanned_path(path: str) -> tuple[str, int] | None:
    """Return the scanned-stack path and the layer number for a parameter of a looped block.

    "decoder/block_3/norm/scale" becomes ("decoder/blocks/norm/scale", 3). Returns None for a
    parameter outside the stacks.
    """
    stack, _, rest = path.partition("/block_")
    number, _, rest = rest.partition("/")
    return (f"{stack}/blocks/{rest}", int(number)) if rest else None


class CheckpointTensors:
    """Tensors in an open folder, which are looked up by the names in the table of a family.

    Raises CheckpointError if a tensor is missing, unknown or does not match the config. The message
    names the file and the tensor.
    """

    def __init__(self, folder: WeightFolder, family: Family) -> None:
        """Translate names from old files and from models without their head."""
        self._folder, self._family = folder, family
        self._in_file: dict[str, str] = {}  # names in the file, keyed by the names in the table
        for name in folder.tensors:
            today = name
            for old, new in family.old_prefixes.items():
                today = new + today.removeprefix(old) if today.startswith(old) else today
            for old, new in family.old_suffixes.items():
                today = today.removesuffix(old) + new if today.endswith(old) else today
            if today in self._in_file:
                raise CheckpointError(
                    f"{self._where(name)} appears twice, as {name!r} and {today!r}"
                )
            self._in_file[today] = name
        # AutoModel saves models without their head. In this case, no name has the prefix.
        self.bare = bool(family.prefix) and not any(
            name.startswith(family.prefix) for name in self._in_file
        )
        if self.bare:
            heads = family.head_tensors
            self._in_file = {
                name if _matches(name, heads) else family.prefix + name: actual
                for name, actual in self._in_file.items()
            }
        if not self._in_file:
            raise CheckpointError(f"{folder.path}: its files contain no tensor")

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all tensors, as in the table."""
        return frozenset(self._in_file)

    def dtype(self, config: ModelConfig) -> DType:
        """Return the dtype of the checkpoint, which is the dtype of the token embeddings."""
        for mapping in self._table(config):
            if mapping.param == "embed/tokens" and mapping.tensor in self._in_file:
                return self._float_dtype(self._in_file[mapping.tensor])
        raise CheckpointError(f"{self._folder.path}: the token embeddings are missing")

    def without_output(self, config: ModelConfig) -> bool:
        """Whether the model was saved without its head, so that the files lack an output matrix."""
        outputs = [m.tensor for m in self._table(config) if m.param == "embed/output"]
        return self.bare and not any(name in self._in_file for name in outputs)

    def check_size(self, config: ModelConfig) -> None:
        """Reject a config whose sizes are impossible for these files, before anything is traced."""
        depth = config.num_layers + (
            config.decoder_layers if config.kind == "encoder-decoder" else 0
        )
        tensors, where = len(self._folder.tensors), self._folder.where
        if depth > tensors:
            raise ConfigError(f"{where}: {depth} layers, but the files have only {tensors} tensors")
        experts = 0 if config.experts is None else config.experts.count
        with_experts = sum(map(config.has_experts, range(config.num_layers)))
        if with_experts * experts > tensors and not self._family.joined_experts:
            rule = f"but the files have only {tensors} tensors"
            raise ConfigError(f"{where}: {experts} experts in {with_experts} layers, {rule}")
        # Python integers, because the product of an untrusted shape may overflow.
        elements = sum(int(np.prod(t.shape, dtype=object)) for t in self._folder.tensors.values())
        for name, size in (
            ("vocab_size", config.vocab_size),
            ("source_vocab_size", config.encoder_vocab_size),
            ("d_model", config.d_model),
            ("embedding_dim", config.embedding_width),
            ("d_ff", config.expert_dim),
            ("experts", experts),
            ("num_heads", config.num_heads),
            ("head_dim", config.key_dim),
            ("gated_delta", 0 if config.gated_delta is None else config.gated_delta.channels),
            *(("conv_width", x.conv_width) for x in (config.gated_delta, config.short_conv) if x),
            ("max_len", config.max_len if isinstance(config.positions, Learned) else 0),
            ("num_heads * head_dim", config.num_heads * config.key_dim),
        ):
            if size > elements:
                keys = [key for key, value in self._folder.config.items() if value == size]
                raise ConfigError(
                    f"{where}: {keys[0] if keys else name} is {size}, "
                    f"but the files have only {elements} numbers"
                )
        family, table = self._family, self._table(config)
        for mapping in table:
            if mapping.tensor not in self._in_file:
                missing = f"{self._folder.path}: tensor {mapping.tensor} is missing"
                if mapping.param == "embed/output" and self.bare:
                    missing += (
                        ": tie_word_embeddings is false, so logits need it. The model was saved "
                        "without its head, as by AutoModel: save it with its head, as a "
                        "...ForCausalLM"
                    )
                raise CheckpointError(missing)
        copies, computed = family.copies(config), family.computed(config)
        ignored = family.ignored(self._folder.config)
        for name in sorted(self.names - {mapping.tensor for mapping in table}):
            if name in computed or copies.get(name) in self._in_file:
                continue
            if not _matches(name, ignored):
                rule = f"{family.name} with this config.json has no such tensor"
                raise CheckpointError(f"{self._where(self._in_file[name])}: {rule}")

    def mappings(self, config: ModelConfig, shapes: Shapes) -> list[TensorMapping]:
        """Check the table of the family against the parameters and the files, and return it."""
        table = self._table(config)
        params = [mapping.param for mapping in table]
        shapes = table_shapes(shapes, set(params))
        if sorted(params) != sorted(shapes):
            raise AssertionError(
                f"{self._family.name}: {set(params) ^ set(shapes)} are not in both"
            )
        for mapping in table:
            actual = self._in_file[mapping.tensor]
            want = mapping.layout.file_shape(shapes[mapping.param].shape)
            found = self._folder.tensors[actual].shape
            if tuple(found) != want:
                raise CheckpointError(
                    f"{self._where(actual)} has shape {list(found)}: "
                    f"config.json requires {list(want)}"
                )
            self._float_dtype(actual)
        computed = self._family.computed(config)
        for name in sorted(self.names - {mapping.tensor for mapping in table}):
            first, actual = self._family.copies(config).get(name), self._in_file[name]
            if first in self._in_file:
                one, two = self._folder.read(actual), self._folder.read(self._in_file[first])
                # Bytes are compared, because NaN does not equal itself.
                same = (one.dtype, one.shape) == (two.dtype, two.shape)
                if not same or one.tobytes() != two.tobytes():
                    rule = f"must equal {first}, to which config.json ties it"
                    raise CheckpointError(f"{self._where(actual)} {rule}")
            elif name in computed:  # equal within the precision of the dtype
                # In half precision, a sine or cosine is rounded by up to 2^-9.
                tolerance = 1e-5 if self._float_dtype(actual) == "float32" else 5e-3
                shape = tuple(self._folder.tensors[actual].shape)
                expected = computed[name](config, shape)
                if expected is not None:
                    stored = self._folder.read(actual).astype(np.float64)
                if expected is None or not np.abs(stored - expected).max() <= tolerance:
                    rule = "differs from the values that config.json determines"
                    if expected is not None and expected.size == 1:
                        family = self._family.name
                        rule = f"is {stored.item():g}: must be {expected.item():g} in {family}"
                    raise CheckpointError(f"{self._where(actual)} {rule}")
        return table

    def parameters(
        self,
        mappings: list[TensorMapping],
        shapes: Shapes,  # as returned by `table_shapes`
        dtype: DType | None,
        computes_in: DType,
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yield every parameter with its path, in the order of the files, one at a time.

        Parameters are cast to `dtype`, unless it is None. Raises ValueError with the name of the
        tensor if a weight overflows `dtype` or `computes_in`.
        """
        wanted = dict[str, list[TensorMapping]]()
        for mapping in mappings:
            wanted.setdefault(self._in_file[mapping.tensor], []).append(mapping)
        for name, tensor in self._folder.read_all(n for n in self._folder.tensors if n in wanted):
            for mapping in wanted[name]:
                param = mapping.layout.read(tensor, shapes[mapping.param].shape)
                if dtype is not None:
                    param = cast(self._where(name), param, dtype)
                elif re.search(r"/(kernel|tokens|output)(/\d+)?$", mapping.param):
                    check_range(self._where(name), param, computes_in)  # products use this dtype
                yield mapping.param, np.ascontiguousarray(param)
                del param
            # Together with the `del` above, this frees a tensor before the next one is read.
            del tensor

    def _where(self, name: str) -> str:
        return f"{self._folder.path / self._folder.tensors[name].file}: {name}"

    def _float_dtype(self, name: str) -> DType:
        found = self._folder.tensors[name].dtype
        if found not in DTYPES:
            rule = f"must be one of {', '.join(DTYPES)}"
            raise CheckpointError(f"{self._where(name)} is {found}: {rule}")
        return found

    def _table(self, config: ModelConfig) -> list[TensorMapping]:
        """Return the table of the family.

        If a tied tensor is missing, the table contains its copy.
        """
        table = self._family.table(config)
        wanted = {mapping.tensor for mapping in table}
        for copy, first in self._family.copies(config).items():
            if copy in self._in_file and copy not in wanted and first not in self._in_file:
                self._in_file[first] = self._in_file.pop(copy)
        return table


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
