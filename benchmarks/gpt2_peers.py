"""GPT-2 with our weights in other libraries, which are the peers in `benchmarks.decode`.

Each peer is built from a case, our float32 parameters, and the dtype of the weights. It raises
`Absent` if it is not installed or does not support the dtype. All peers use every core and have the
settings that were fastest on two cores (`NOTES.md`). They store keys and values in float32, except
Hugging Face, which uses its compute dtype.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from benchmarks.peers import Absent, cores, imported, torch_and_device
from benchmarks.specs import DecodeCase

Weights = Literal["f32", "bf16", "int8", "int4"]
HUGGING_FACE, COMPILED = "Hugging Face", "Hugging Face, compiled"
CTRANSLATE2, LLAMA_CPP = "CTranslate2", "llama.cpp"
XLLAMACPP = "llama.cpp, xllamacpp"
DTYPES: dict[Weights, str] = {
    "f32": "float32", "bf16": "bfloat16", "int8": "int8", "int4": "int4",
}  # fmt: skip


GGUF_BYTES: dict[Weights, float] = {"f32": 4.0, "bf16": 2.0, "int8": 34 / 32, "int4": 18 / 32}
"""Number of bytes per weight in a GGUF file."""


@dataclass(frozen=True)
class Peer:
    """Decoder whose calls both return only when the results are complete."""

    generate: Callable[[int], np.ndarray]
    """Function that continues the prompts by n tokens and returns them, i32[B, n]."""
    logits: Callable[[], np.ndarray]
    """Function that returns the logits after each prompt, f32[B, V]."""
    token_bytes: int
    """Number of bytes of stored weights that are read per token."""


def prompts(case: DecodeCase) -> list[list[int]]:
    """Return the prompts of a case without padding."""
    rows = zip(case.tokens(), case.lengths(), strict=True)
    return [row[:length].tolist() for row, length in rows]


def hugging_face(
    case: DecodeCase, params: dict[str, Any], weights: Weights, compiled: bool = False
) -> Peer:
    """Return `GPT2LMHeadModel.generate`, which pads shorter rows on the left.

    For bf16, this is also the compute dtype, because torch has no other product for bfloat16.
    """
    if weights in ("int8", "int4"):
        raise Absent(f"no {weights} weights without another package")
    torch, device = torch_and_device()
    try:
        from transformers import CompileConfig, GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise Absent(f"{error.name} is not installed") from error
    cfg = case.model
    config = GPT2Config(
        vocab_size=cfg.vocab_size, n_positions=cfg.max_len, n_embd=cfg.d_model,
        n_layer=cfg.num_layers, n_head=cfg.num_heads, n_inner=cfg.ff_dim,
        layer_norm_epsilon=cfg.norm_eps, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.device(device):  # on a CPU, drawing 1.5 billion numbers takes half a minute
        model = GPT2LMHeadModel(config)
    state = gpt2_state(params, cfg.num_layers)
    model.load_state_dict({name: torch.from_numpy(x) for name, x in state.items()}, strict=False)
    dtype = getattr(torch, DTYPES[weights])
    model = model.eval().to(device=device, dtype=dtype)
    if model.num_parameters() != sum(leaf.size for leaf in jax.tree.leaves(params)):
        raise AssertionError(f"the peer has {model.num_parameters()} parameters")

    lengths = case.lengths()
    columns = np.arange(case.prompt)[None] - (case.prompt - lengths[:, None])  # columns of our rows
    tokens = np.take_along_axis(case.tokens(), np.maximum(columns, 0), axis=1)
    ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
    mask = torch.from_numpy((columns >= 0).astype(np.int64)).to(device)
    more: dict[str, Any] = {"cache_implementation": "static"} if compiled else {}
    if compiled and device == "cpu":  # on a CPU, `generate` compiles only on request
        more["compile_config"] = CompileConfig(mode="default")
        more["compile_config"]._compile_all_devices = True

    def call(new: int, **options: Any) -> Any:
        with torch.inference_mode():
            return model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=new,
                pad_token_id=0, **more, **options,
            )  # fmt: skip

    def tokens_of(new: int) -> np.ndarray:
        return call(new)[:, case.prompt :].cpu().numpy().astype(np.int32)

    def logits() -> np.ndarray:
        found = call(1, return_dict_in_generate=True, output_logits=True)
        return found.logits[0].float().cpu().numpy()

    each = np.dtype(np.float32).itemsize if weights == "f32" else 2
    return Peer(tokens_of, logits, token_bytes(state, each, each))


def ctranslate2(case: DecodeCase, params: dict[str, Any], weights: Weights) -> Peer:
    """Return CTranslate2's `Generator` with our weights, named as in its GPT-2 converter.

    For int8, weights have one scale per output. Activations are also int8, with one scale per row.
    """
    library = imported("ctranslate2")
    supported = library.get_supported_compute_types("cpu")
    if DTYPES[weights] not in supported:
        raise Absent(f"computes in {', '.join(sorted(supported))} on this processor")
    if jax.default_backend() != "cpu":
        raise Absent("is given a processor only")
    cfg, state = case.model, gpt2_state(params, case.model.num_layers)
    spec = library.specs.TransformerDecoderModelSpec.from_config(
        cfg.num_layers, cfg.num_heads, pre_norm=True, activation=library.specs.Activation.GELUTanh
    )
    _fill(spec.decoder, state)
    spec.register_vocabulary([str(token) for token in range(cfg.vocab_size)])
    for token in ("bos_token", "eos_token", "unk_token"):
        setattr(spec.config, token, "0")
    spec.config.layer_norm_epsilon = cfg.norm_eps
    spec.validate()
    spec.optimize(quantization=DTYPES[weights])
    with tempfile.TemporaryDirectory() as folder:
        spec.save(folder)
        generator = library.Generator(
            folder, compute_type=DTYPES[weights], inter_threads=1, intra_threads=cores()
        )
    starts = [[str(token) for token in row] for row in prompts(case)]

    def generate(new: int) -> np.ndarray:
        found = generator.generate_batch(
            starts, max_length=new, include_prompt_in_result=False, sampling_topk=1, end_token=[]
        )
        return np.array([row.sequences_ids[0] for row in found], np.int32)

    def logits() -> np.ndarray:
        found = np.asarray(generator.forward_batch(prompts(case), return_log_probs=False))
        return found[np.arange(case.batch), case.lengths() - 1]

    return Peer(generate, logits, token_bytes(state, 1 if weights == "int8" else 4, 4, scales=4))


def _fill(decoder: Any, state: dict[str, np.ndarray]) -> None:
    """Copy our weights to a CTranslate2 decoder, whose matrices are [out, in]."""

    def linear(spec: Any, name: str) -> None:
        spec.weight = np.ascontiguousarray(state[f"{name}.weight"].T)
        spec.bias = state[f"{name}.bias"]

    def norm(spec: Any, name: str) -> None:
        spec.gamma, spec.beta = state[f"{name}.weight"], state[f"{name}.bias"]

    decoder.scale_embeddings = False
    decoder.embeddings.weight = state["transformer.wte.weight"]
    decoder.position_encodings.encodings = state["transformer.wpe.weight"]
    decoder.projection.weight = state["lm_head.weight"]
    norm(decoder.layer_norm, "transformer.ln_f")
    for i, layer in enumerate(decoder.layer):
        at = f"transformer.h.{i}"
        norm(layer.self_attention.layer_norm, f"{at}.ln_1")
        linear(layer.self_attention.linear[0], f"{at}.attn.c_attn")
        linear(layer.self_attention.linear[1], f"{at}.attn.c_proj")
        norm(layer.ffn.layer_norm, f"{at}.ln_2")
        linear(layer.ffn.linear_0, f"{at}.mlp.c_fc")
        linear(layer.ffn.linear_1, f"{at}.mlp.c_proj")


def llama_cpp(case: DecodeCase, params: dict[str, Any], weights: Weights) -> Peer:
    """Return a llama.cpp decoder, which llama-cpp-python compiles for this processor.

    For int8, the format is Q8_0, which has one float16 scale per 32 weights and per 32 activations.
    GELU is always read from a float16 table.
    """
    library, gguf = imported("llama_cpp"), imported("gguf")
    if jax.default_backend() != "cpu":
        raise Absent("is compiled for a processor only")
    state = gpt2_state(params, case.model.num_layers)
    library.llama_log_set(_silence(library), None)
    library.llama_backend_init()
    options = library.llama_model_default_params()
    options.load_mode = library.LLAMA_LOAD_MODE_MMAP
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(gguf, path, case, state, weights)
        model = library.llama_model_load_from_file(str(path).encode(), options)
    if not model:
        raise AssertionError("llama.cpp does not load the file that was written for it")
    room = case.batch * case.prompt
    options = library.llama_context_default_params()
    options.n_ctx = case.batch * case.capacity
    options.n_batch = options.n_ubatch = room
    options.n_seq_max = case.batch
    options.n_threads = options.n_threads_batch = cores()
    options.type_k = options.type_v = library.GGML_TYPE_F32
    options.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = library.llama_init_from_model(model, options)
    if not context:
        raise AssertionError("llama.cpp makes no context")
    batch = library.llama_batch_init(room, 0, 1)

    def step(rows: Sequence[Sequence[int]], starts: Sequence[int]) -> np.ndarray:  # f32[B, V]
        at, ends = 0, []
        for row, (tokens, start) in enumerate(zip(rows, starts, strict=True)):
            for i, token in enumerate(tokens):
                batch.token[at], batch.pos[at] = token, start + i
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
                batch.logits[at] = i == len(tokens) - 1
                at += 1
            ends.append(at - 1)
        batch.n_tokens = at
        if library.llama_decode(context, batch) != 0:
            raise AssertionError("llama.cpp does not decode")
        found = [library.llama_get_logits_ith(context, end) for end in ends]
        return np.stack([np.ctypeslib.as_array(x, (case.model.vocab_size,)) for x in found])

    def logits() -> np.ndarray:
        library.llama_memory_clear(library.llama_get_memory(context), False)
        return step(prompts(case), [0] * case.batch)

    def generate(new: int) -> np.ndarray:
        tokens = [logits().argmax(axis=1)]
        while len(tokens) < new:
            starts = [length + len(tokens) - 1 for length in case.lengths().tolist()]
            tokens.append(step(tokens[-1][:, None].tolist(), starts).argmax(axis=1))
        return np.stack(tokens, axis=1).astype(np.int32)

    return Peer(generate, logits, token_bytes(state, GGUF_BYTES[weights], 4))


def xllamacpp(case: DecodeCase, params: dict[str, Any], weights: Weights) -> Peer:
    """Return llama.cpp's server, which xllamacpp runs in this process.

    A call includes the server's queue and sampler. It returns log-probabilities instead of logits.
    For int4, the format is Q4_0, and activations are rounded to Q8_0.
    """
    library, gguf = imported("xllamacpp"), imported("gguf")
    if jax.default_backend() != "cpu":
        raise Absent("is compiled for a processor only")
    if case.batch > 1:
        raise Absent("decodes one row")
    state = gpt2_state(params, case.model.num_layers)
    settings = library.CommonParams()
    settings.n_ctx, settings.n_parallel, settings.warmup = case.capacity, 1, False
    settings.cache_type_k = settings.cache_type_v = library.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = library.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = cores()
    settings.verbosity = -1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(gguf, path, case, state, weights, bytes_as_tokens=True)
        settings.model.path = str(path)
        server = library.Server(settings)
    (prompt,) = prompts(case)

    def complete(new: int, **more: Any) -> dict[str, Any]:
        request = {"prompt": prompt, "max_tokens": new, "temperature": 0.0, "ignore_eos": True}
        answer = server.handle_completions(request | {"cache_prompt": False} | more)
        found = json.loads(answer) if isinstance(answer, str | bytes) else answer
        if found["usage"]["completion_tokens"] != new:
            raise AssertionError(f"llama.cpp returns {found['usage']}: must have {new} tokens")
        return found["choices"][0]

    def generate(new: int) -> np.ndarray:  # the server returns text, so the tokens are not known
        complete(new)
        return np.zeros((1, new), np.int32)

    def logits() -> np.ndarray:
        answer = complete(1, logprobs=case.model.vocab_size)
        found = np.full((1, case.model.vocab_size), -np.inf, np.float32)
        for one in answer["logprobs"]["content"][0]["top_logprobs"]:
            found[0, one["id"]] = one["logprob"]
        return found

    return Peer(generate, logits, token_bytes(state, GGUF_BYTES[weights], 4))


def in_q4_0(params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters with kernels and token vectors rounded to Q4_0, as in llama.cpp."""
    gguf = imported("gguf")
    kind = gguf.GGMLQuantizationType.Q4_0

    def rounded(path: Any, x: jax.Array) -> jax.Array:
        names = [key.key for key in path]
        if names[-1] not in ("kernel", "tokens"):
            return x
        rows = np.array(x, np.float32)  # [inputs, outputs], except for tokens
        if names[-1] == "tokens":
            return jax.numpy.asarray(gguf.dequantize(gguf.quantize(rows, kind), kind))
        inputs = x.size // x.shape[-1] if names[-2] in ("out", "down") else x.shape[0]
        columns = np.ascontiguousarray(rows.reshape(inputs, -1).T)
        back = gguf.dequantize(gguf.quantize(columns, kind), kind)
        return jax.numpy.asarray(back.T.reshape(x.shape))

    found: dict[str, Any] = jax.tree_util.tree_map_with_path(rounded, params)
    return found


def write_gguf(
    gguf: Any, path: Path, case: DecodeCase, state: dict[str, np.ndarray], weights: Weights,
    *, bytes_as_tokens: bool = False,
) -> None:  # fmt: skip
    """Write our weights in llama.cpp's format, with matrices as [out, in] and float32 vectors.

    `bytes_as_tokens` adds a vocabulary, without which llama.cpp's server does not start.
    """
    cfg, kinds = case.model, gguf.GGMLQuantizationType
    kind = {"f32": kinds.F32, "bf16": kinds.BF16, "int8": kinds.Q8_0, "int4": kinds.Q4_0}[weights]
    names = {
        "transformer.wte": "token_embd", "transformer.wpe": "position_embd",
        "transformer.ln_f": "output_norm", "ln_1": "attn_norm", "ln_2": "ffn_norm",
        "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up",
        "mlp.c_proj": "ffn_down",
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(cfg.max_len)
    writer.add_embedding_length(cfg.d_model)
    writer.add_feed_forward_length(cfg.ff_dim)
    writer.add_block_count(cfg.num_layers)
    writer.add_head_count(cfg.num_heads)
    writer.add_layer_norm_eps(cfg.norm_eps)
    writer.add_vocab_size(cfg.vocab_size)
    if bytes_as_tokens:
        visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [byte for byte in range(256) if byte not in visible]  # as in GPT-2
        letters = [chr(x) for x in visible] + [chr(256 + i) for i in range(len(hidden))]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([*letters, *(f"a{i}" for i in range(256, cfg.vocab_size))])
        writer.add_token_types([1] * cfg.vocab_size)
        writer.add_token_merges(["a 2"])
    else:
        writer.add_tokenizer_model("none")
    for name, x in state.items():
        if name == "lm_head.weight":
            continue  # without a head, the token table is used
        at, _, end = name.rpartition(".")
        block, module = at.removeprefix("transformer.h.").partition(".")[::2]
        label = f"blk.{block}.{names[module]}" if block.isdigit() else names[at]
        x = np.ascontiguousarray(x.T if block.isdigit() else x)
        rounded = x.ndim == 2 and at != "transformer.wpe"
        data = gguf.quantize(x, kind) if rounded else x
        writer.add_tensor(f"{label}.{end}", data, raw_dtype=kind if rounded else kinds.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@functools.cache
def _silence(library: Any) -> Any:
    """Return a logger that prints nothing and must exist as long as the library."""
    return library.llama_log_callback(lambda level, text, data: None)


def token_bytes(
    state: dict[str, np.ndarray], matrix: float, vector: float, scales: float = 0
) -> int:
    """Return the number of bytes of weights that are read per token.

    The token table is read once as the output matrix, and one row of the position table is read.
    `scales` is the number of additional bytes per output of a matrix.
    """
    found = 0.0
    for name, x in state.items():
        if x.ndim == 1:
            found += x.size * vector
        elif name not in ("transformer.wte.weight", "transformer.wpe.weight"):
            outputs = x.shape[0] if name == "lm_head.weight" else x.shape[1]
            found += x.size * matrix + outputs * scales
    return int(found)


def gpt2_state(params: dict[str, Any], layers: int) -> dict[str, np.ndarray]:
    """Return our parameters with the names in Hugging Face's GPT-2. Both use [in, out]."""

    def array(leaf: jax.Array, *shape: int) -> np.ndarray:
        return np.array(leaf, np.float32).reshape(shape or leaf.shape)

    def norm(at: str, node: dict[str, Any]) -> dict[str, np.ndarray]:
        return {f"{at}.weight": array(node["scale"]), f"{at}.bias": array(node["bias"])}

    stack, embed = params["decoder"], params["embed"]
    width = embed["tokens"].shape[1]
    state = {
        "transformer.wte.weight": array(embed["tokens"]),
        "lm_head.weight": array(embed["tokens"]),
        "transformer.wpe.weight": array(embed["positions"]),
        **norm("transformer.ln_f", stack["norm"]),
    }
    for i in range(layers):
        at, block = f"transformer.h.{i}", stack[f"block_{i}"]
        attention, forward = block["attention"], block["feed_forward"]
        qkv = [attention[name] for name in ("query", "key", "value")]
        state |= norm(f"{at}.ln_1", block["norm_attention"])
        state |= norm(f"{at}.ln_2", block["norm_feed_forward"])
        state |= {
            f"{at}.attn.c_attn.weight": np.hstack([array(x["kernel"], width, -1) for x in qkv]),
            f"{at}.attn.c_attn.bias": np.hstack([array(x["bias"], -1) for x in qkv]),
            f"{at}.attn.c_proj.weight": array(attention["out"]["kernel"], -1, width),
            f"{at}.attn.c_proj.bias": array(attention["out"]["bias"]),
        }
        for theirs, mine in (("c_fc", "up"), ("c_proj", "down")):
            state[f"{at}.mlp.{theirs}.weight"] = array(forward[mine]["kernel"])
            state[f"{at}.mlp.{theirs}.bias"] = array(forward[mine]["bias"])
    return state


Builder = Callable[[DecodeCase, dict[str, Any], Weights], Peer]
BUILDERS: dict[str, Builder] = {
    HUGGING_FACE: hugging_face,
    COMPILED: functools.partial(hugging_face, compiled=True),
    CTRANSLATE2: ctranslate2,
    LLAMA_CPP: llama_cpp,
    XLLAMACPP: xllamacpp,
}
