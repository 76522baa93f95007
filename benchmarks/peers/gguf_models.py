"""Worker for llama.cpp, through the C interface that llama-cpp-python has: BF16, Q8_0, Q4_0 and Q4_K_M.

The checkpoint is written as GGUF with the gguf package, and quantized by llama.cpp itself with its default mixtures.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import protocol

ARCHITECTURE = "llama"
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
}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """A tensor's name in GGUF for its name in the checkpoint."""
    name = name.removesuffix(".weight")
    if name in TOP_NAMES:
        return f"{TOP_NAMES[name]}.weight"
    layer, part = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{NAMES[part]}.weight"


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


def write_bf16(folder: Path, path: Path) -> None:
    """The checkpoint as GGUF, without a tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, bits in bfloat16_tensors(folder / "model.safetensors").items():
        if bits.ndim == 1:  # norms are float32 in GGUF
            writer.add_tensor(gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
            continue
        if "q_proj" in name or "k_proj" in name:
            bits = interleaved(bits, heads if "q_proj" in name else kv_heads)
        data = np.ascontiguousarray(bits).view(np.uint8)
        writer.add_tensor(gguf_name(name), data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def converted(folder: Path, variant: str) -> Path:
    """The GGUF file of a variant, made where there is none."""
    path = folder / f"{variant}.gguf"
    if not path.exists():
        part = path.with_suffix(".part")
        if variant == "BF16":
            write_bf16(folder, part)
        else:
            options = llama_cpp.llama_model_quantize_default_params()
            options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{variant}")
            source = converted(folder, "BF16")
            status = llama_cpp.llama_model_quantize(bytes(source), bytes(part), ctypes.byref(options))
            if status:
                raise RuntimeError(f"llama_model_quantize returned {status}")
        part.rename(path)
    return path


class GgufModels(protocol.Worker):
    def load(self, folder: str, variant: str, dtype: str, threads: int) -> dict[str, Any]:
        self.path = converted(Path(folder), variant)
        self.threads = threads
        self.vocabulary = protocol.vocabulary(folder)
        self.contexts: dict[tuple[int, int], Any] = {}
        self.high_level: llama_cpp.Llama | None = None
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(bytes(self.path), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {self.path.name}")
        tensors = gguf.GGUFReader(self.path).tensors
        return {
            "version": f"llama-cpp-python {llama_cpp.__version__}",
            "weight_bytes": int(sum(tensor.n_bytes for tensor in tensors if tensor.name != "token_embd.weight")),
        }

    def context(self, batch: int, length: int) -> Any:
        """An empty context for `batch` sequences of `length` tokens; made once."""
        key = (batch, length)
        if key not in self.contexts:
            options = llama_cpp.llama_context_default_params()
            options.n_ctx = batch * (length + 256)  # llama.cpp gives each sequence its part, in multiples of 256
            options.n_batch = BLOCK
            options.n_seq_max = batch
            options.n_threads = options.n_threads_batch = self.threads
            self.contexts[key] = llama_cpp.llama_init_from_model(self.model, options)
            if not self.contexts[key]:
                raise RuntimeError("llama_init_from_model failed")
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.contexts[key]), True)
        return self.contexts[key]

    @contextlib.contextmanager
    def batch(self, pieces: list[tuple[int, int, list[int]]]) -> Any:
        """Pieces of (sequence, position, tokens); logits of each piece's last token."""
        batch = llama_cpp.llama_batch_init(sum(len(tokens) for *_, tokens in pieces), 0, 1)
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
            llama_cpp.llama_batch_free(batch)

    def run(self, context: Any, batch: Any) -> None:
        status = llama_cpp.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        llama_cpp.llama_synchronize(context)

    def row(self, context: Any, index: int) -> np.ndarray:
        """The logits of one token of the last batch; -1: of its last."""
        pointer = llama_cpp.llama_get_logits_ith(context, index)
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

    def generate(self, prompt: int, steps: int) -> float:
        if self.high_level is None:
            self.high_level = llama_cpp.Llama(
                str(self.path),
                n_ctx=prompt + steps,
                n_threads=self.threads,
                n_threads_batch=self.threads,
                verbose=False,
            )
        (tokens,) = protocol.prompt(1, prompt, self.vocabulary)
        self.high_level.reset()  # or it would keep the prompt of the last call
        start = time.perf_counter()
        source = self.high_level.generate(tokens, temp=0.0)
        for _ in range(steps):
            next(source)
        seconds = time.perf_counter() - start
        source.close()
        return seconds

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
            llama_cpp.llama_free(context)
        self.contexts.clear()
        self.high_level = None


if __name__ == "__main__":
    protocol.serve(GgufModels())
