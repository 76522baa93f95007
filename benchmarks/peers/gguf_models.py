"""What the workers for llama.cpp and its fork share: the models in GGUF, and the C interface that both have.

The checkpoint is written as GGUF with the gguf package, and quantized by each project itself with its default mixtures.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import protocol

# By the model_type of the config.
ARCHITECTURES = {
    **{"llama": "llama", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"},
    **{"gemma3_text": "gemma3", "granite": "granite", "olmo2": "olmo2", "phi3": "phi3", "glm4": "glm4"},
}
BLOCK = 2048  # most tokens of one llama_decode; llama.cpp itself cuts it into pieces of 512
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "self_attn.sinks": "attn_sinks",
}
# Where post_attention_layernorm is a norm of what attention gives, not of what the MLP takes.
POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
WITH_POST_NORMS = ("gemma3", "olmo2")
GLM4_NORMS = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}
INTERLEAVED = ("llama", "granite")  # whose files have rotary pairs side by side
SCALES = {
    "attention_multiplier": "add_attention_scale",
    "embedding_multiplier": "add_embedding_scale",
    "residual_multiplier": "add_residual_scale",
    "logits_scaling": "add_logit_scale",
}
ROUTERS = ("mlp.gate.weight", "mlp.router.weight")
EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str, architecture: str) -> str:
    """A tensor's name in GGUF for its name in the checkpoint."""
    suffix = "bias" if name.endswith(".bias") else "weight"
    name = name.removesuffix(f".{suffix}")
    if name in TOP_NAMES:
        return f"{TOP_NAMES[name]}.{suffix}"
    layer, part = name.removeprefix("model.layers.").split(".", 1)
    if architecture in WITH_POST_NORMS and part in POST_NORMS:
        return f"blk.{layer}.{POST_NORMS[part]}.{suffix}"
    if architecture == "glm4" and part in GLM4_NORMS:
        return f"blk.{layer}.{GLM4_NORMS[part]}.{suffix}"
    is_norm = architecture == "gpt-oss" and part == "post_attention_layernorm"
    return f"blk.{layer}.{'post_attention_norm' if is_norm else NAMES[part]}.{suffix}"


def experts_of(tensors: dict[str, np.ndarray], layer: int, count: int) -> Iterator[tuple[str, np.ndarray]]:
    """Names in GGUF of a layer's experts, and their weights [experts, out, in] and biases [experts, out], as bits."""
    prefix = f"model.layers.{layer}.mlp.experts"
    if f"{prefix}.gate_up_proj" in tensors:  # gpt-oss: [experts, in, out], gate and up in turns
        for part in ("gate_up_proj", "down_proj"):
            names = [EXPERTS[name] for name in (("gate_proj", "up_proj") if part == "gate_up_proj" else (part,))]
            for i, name in enumerate(names):
                yield f"{name}.weight", tensors[f"{prefix}.{part}"][:, :, i :: len(names)].swapaxes(1, 2)
                yield f"{name}.bias", tensors[f"{prefix}.{part}_bias"][:, i :: len(names)]
        return
    for part, name in EXPERTS.items():
        yield f"{name}.weight", np.stack([tensors[f"{prefix}.{i}.{part}.weight"] for i in range(count)])


def bfloat16_tensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file in bfloat16, which NumPy has not, as their bits in uint16."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} must be BF16, got {entry['dtype']}")
        begin = start + entry["data_offsets"][0]
        tensors[name] = np.memmap(path, np.uint16, "r", begin, tuple(entry["shape"]))
    return tensors


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in llama.cpp's order: rotary pairs lie side by side, not half a head apart."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def float32(bits: np.ndarray) -> np.ndarray:
    """bfloat16 values, given as their bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def write_bf16(folder: Path, path: Path, tokens: Sequence[str] = ()) -> None:
    """The checkpoint as GGUF; with a byte-level tokenizer of these tokens, none of them merged, or without one."""
    config = protocol.config_of(folder)
    architecture = ARCHITECTURES[config["model_type"]]
    heads, kv_heads, layers = (
        config[f"num_{name}"] for name in ("attention_heads", "key_value_heads", "hidden_layers")
    )
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    experts = config.get("num_local_experts", 0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(config.get("rope_theta") or rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2" if tokens else "no_vocab")
    if tokens:
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
        writer.add_token_merges(["w w"])  # it wants some
        writer.add_add_bos_token(False)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if architecture == "granite":
        for name, scale in SCALES.items():
            getattr(writer, scale)(config[name])
    if architecture in ("gpt-oss", "gemma3"):
        writer.add_sliding_window(config["sliding_window"])

    def add(name: str, bits: np.ndarray) -> None:
        data = np.ascontiguousarray(bits).view(np.uint8)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)

    tensors = bfloat16_tensors(folder / "model.safetensors")
    for name, bits in tensors.items():
        if ".experts." in name:
            continue
        to = gguf_name(name, architecture)
        if bits.ndim == 1 or name.endswith(ROUTERS):  # norms, biases and routers are float32 in GGUF
            writer.add_tensor(to, float32(bits) + (architecture == "gemma3"))  # whose norms have 1 added in files
        elif architecture in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
            add(to, interleaved(bits, heads if "q_proj" in name else kv_heads))
        else:
            add(to, bits)
    for layer in range(layers if experts else 0):
        for name, bits in experts_of(tensors, layer, experts):
            if name.endswith(".bias"):
                writer.add_tensor(f"blk.{layer}.{name}", float32(bits))
            else:
                add(f"blk.{layer}.{name}", bits)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class GgufParameters(ctypes.Structure):
    """gguf_init_params of ggml: where to put the context that has a file's tensors."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.POINTER(ctypes.c_void_p)))


def tensor_bytes(library: ctypes.CDLL, path: Path) -> dict[tuple[str, int], int]:
    """Bytes of each tensor of a file, by its name and dimensions.

    As the library has them: the gguf package does not know the fork's formats.
    """

    def call(name: str, result: Any, *arguments: Any) -> Any:
        function = library[name]
        function.restype = result
        return function(*arguments)

    context = ctypes.c_void_p()
    parameters = GgufParameters(True, ctypes.pointer(context))
    file = ctypes.c_void_p(call("gguf_init_from_file", ctypes.c_void_p, bytes(path), parameters))
    if not file:
        raise RuntimeError(f"{path.name} cannot be read")
    sizes = {}
    tensor = call("ggml_get_first_tensor", ctypes.c_void_p, context)
    while tensor:
        this = ctypes.c_void_p(tensor)
        name = call("ggml_get_name", ctypes.c_char_p, this).decode()
        sizes[name, call("ggml_n_dims", ctypes.c_int, this)] = call("ggml_nbytes", ctypes.c_size_t, this)
        tensor = call("ggml_get_next_tensor", ctypes.c_void_p, context, this)
    call("gguf_free", None, file)
    call("ggml_free", None, context)
    return sizes


class GgufModels(protocol.Worker, ABC):
    """A worker for one of the two.

    Attributes:
        api: The module of the functions and structures of llama.h.
        version: Of its package.
        prefix: Of the names of the files that its quantizer makes.
    """

    api: Any
    version: str
    prefix: str

    @abstractmethod
    def quantize(self, source: Path, variant: str, path: Path) -> None:
        """Write a file in another format."""

    def model_options(self) -> Any:
        """How to load the model."""
        return self.api.llama_model_default_params()

    @abstractmethod
    def clear(self, context: Any) -> None:
        """Empty the cache."""

    def converted(self, folder: Path, variant: str) -> Path:
        """The GGUF file of a variant, made where there is none."""
        path = folder / (f"{variant}.gguf" if variant == "BF16" else f"{self.prefix}{variant}.gguf")
        if not path.exists():
            part = path.with_suffix(".part")
            if variant == "BF16":
                write_bf16(folder, part)
            else:
                self.quantize(self.converted(folder, "BF16"), variant, part)
            part.rename(path)
        return path

    def load(self, folder: str, variant: str, dtype: str, threads: int) -> dict[str, Any]:
        self.path = self.converted(Path(folder), variant)
        self.threads = threads
        self.vocabulary = protocol.vocabulary(folder)
        self.contexts: dict[tuple[int, int], Any] = {}
        self.api.llama_backend_init()
        self.model = self.api.llama_model_load_from_file(bytes(self.path), self.model_options())
        if not self.model:
            raise RuntimeError(f"{self.path.name} could not be loaded")
        sizes = {key: n for key, n in tensor_bytes(self.api._lib, self.path).items() if key[0] != "token_embd.weight"}
        share = protocol.chosen_share(folder)
        return {
            "version": self.version,
            "weight_bytes": round(sum(size * (share if "_exps" in name else 1) for (name, _), size in sizes.items())),
            "linear_bytes": sum(size for (_, dimensions), size in sizes.items() if dimensions == 2),
        }

    def context(self, batch: int, length: int) -> Any:
        """An empty context for `batch` sequences of `length` tokens; made once."""
        key = (batch, length)
        if key not in self.contexts:
            options = self.api.llama_context_default_params()
            options.n_ctx = batch * (length + 256)  # llama.cpp gives each sequence its part, in multiples of 256
            options.n_batch = BLOCK
            options.n_seq_max = batch
            options.n_threads = options.n_threads_batch = self.threads
            self.contexts[key] = self.api.llama_init_from_model(self.model, options)
            if not self.contexts[key]:
                raise RuntimeError("llama_init_from_model failed")
        self.clear(self.contexts[key])
        return self.contexts[key]

    @contextlib.contextmanager
    def batch(self, pieces: list[tuple[int, int, list[int]]]) -> Any:
        """Pieces of (sequence, position, tokens); logits of each piece's last token."""
        batch = self.api.llama_batch_init(sum(len(tokens) for *_, tokens in pieces), 0, 1)
        i = 0
        for sequence, position, tokens in pieces:
            for offset, token in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position + offset, 1
                batch.seq_id[i][0] = sequence
                batch.logits[i] = offset == len(tokens) - 1
                i += 1
        batch.n_tokens = i
        try:
            yield batch
        finally:
            self.api.llama_batch_free(batch)

    def run(self, context: Any, batch: Any) -> None:
        status = self.api.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        self.api._lib.llama_synchronize(ctypes.c_void_p(context))

    def row(self, context: Any, index: int) -> np.ndarray:
        """The logits of one token of the last batch; -1: of its last."""
        pointer = self.api.llama_get_logits_ith(context, index)
        return np.ctypeslib.as_array(pointer, (self.vocabulary,))

    def logits(self, tokens: list[int], prompt: int, out: str) -> None:
        context = self.context(1, len(tokens))
        rows = []
        for begin, end in [(0, prompt), *((i, i + 1) for i in range(prompt, len(tokens)))]:
            with self.batch([(0, begin, tokens[begin:end])]) as batch:
                self.run(context, batch)
                rows.append(self.row(context, -1).copy())
        np.stack(rows).astype(np.float32).tofile(out)

    def decode(self, batch: int, context: int, steps: int) -> float:
        llama = self.context(batch, context + steps)
        for sequence, row in enumerate(protocol.prompt(batch, context, self.vocabulary)):
            with self.batch([(sequence, 0, row)]) as block:
                self.run(llama, block)
        tokens = [1] * batch
        start = time.perf_counter()
        for step in range(steps):
            with self.batch([(i, context + step, [token]) for i, token in enumerate(tokens)]) as block:
                self.run(llama, block)
            tokens = [int(self.row(llama, i).argmax()) for i in range(batch)]
        return time.perf_counter() - start

    def prefill(self, tokens: int) -> float:
        context = self.context(1, tokens)
        with self.batch([(0, 0, protocol.prompt(1, tokens, self.vocabulary)[0])]) as batch:
            start = time.perf_counter()
            self.run(context, batch)
            self.row(context, -1)
            return time.perf_counter() - start

    def serve(self, prompts: list[list[int]], outputs: list[int]) -> float:
        """A sequence for each request, as llama-server does with as many slots: a batch is one token of each request
        that generates, and of prompts what fits."""
        context = self.context(len(prompts), protocol.longest(prompts, outputs))
        tokens = [list(prompt) for prompt in prompts]
        ends = [len(prompt) + output for prompt, output in zip(prompts, outputs, strict=True)]
        done = [0] * len(prompts)  # tokens in the cache
        start = time.perf_counter()
        while any(len(row) < end for row, end in zip(tokens, ends, strict=True)):
            pieces: list[tuple[int, int, list[int]]] = []
            room = BLOCK
            # Those with a single token come first.
            for i in sorted(range(len(tokens)), key=lambda i: len(tokens[i]) - done[i] > 1):
                if len(tokens[i]) < ends[i] and room > 0:
                    pieces.append((i, done[i], tokens[i][done[i] : done[i] + room]))
                    room -= len(pieces[-1][2])
            with self.batch(pieces) as batch:
                self.run(context, batch)
            last = -1
            for i, position, piece in pieces:
                last += len(piece)
                done[i] = position + len(piece)
                if done[i] == len(tokens[i]):
                    tokens[i].append(int(self.row(context, last).argmax()))
        return time.perf_counter() - start

    def release(self) -> None:
        for context in self.contexts.values():
            self.api.llama_free(context)
        self.contexts.clear()
