"""Worker for OpenVINO: the model as optimum-intel exports it, with weights in bfloat16, 8 or 4 bits.

Steps and prompts are timed at the compiled model's own request, generate() at optimum-intel's model, many requests at
once at openvino_genai's ContinuousBatchingPipeline. Keys and values are cached in 8 bits: OpenVINO's default.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino.opset15 as opset
import openvino_genai
import protocol
import torch
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

# Weights alone are quantized, without data: these are optimum-intel's own choices for 8 and 4 bits.
QUANTIZED = {"int8": OVWeightQuantizationConfig(bits=8), "int4": OVWeightQuantizationConfig(bits=4)}

BATCHED_TOKENS = 2048  # in a step of the pipeline, at most, as llama.cpp's worker has it


def converted(folder: Path, dtype: str) -> Path:
    """The folder of the exported model, made where there is none."""
    path = folder / f"openvino-{dtype}"
    if not path.exists():
        part = path.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        model = OVModelForCausalLM.from_pretrained(
            str(folder),
            export=True,
            compile=False,
            load_in_8bit=False,
            quantization_config=QUANTIZED.get(dtype),
        )
        model.save_pretrained(part)
        part.rename(path)
    return path


class OpenvinoModels(protocol.Worker):
    def load(self, folder: str, variant: str, dtype: str, threads: int) -> dict[str, Any]:
        self.vocabulary = protocol.vocabulary(folder)
        self.options = {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "bf16",
        }
        self.path = converted(Path(folder), dtype)
        self.pipeline: openvino_genai.ContinuousBatchingPipeline | None = None
        self.model = OVModelForCausalLM.from_pretrained(str(self.path), ov_config=self.options, compile=False)
        last_token_only(self.model.model)
        self.model.compile()
        self.request = self.model.request
        self.inputs = {name for tensor in self.model.model.inputs for name in tensor.get_names()}
        return {
            "version": f"openvino {openvino.__version__.split('-')[0]}, "
            f"optimum-intel {importlib.metadata.version('optimum-intel')}, "
            f"openvino-genai {importlib.metadata.version('openvino-genai')}",
            "weight_bytes": weight_bytes(self.model.model),
        }

    def run(self, ids: np.ndarray, position: int) -> np.ndarray:
        """The logits [batch, 1, vocabulary] of the last token, of `ids` behind `position` others."""
        batch, length = ids.shape
        values = {
            "input_ids": ids,
            "attention_mask": np.ones((batch, position + length), np.int64),
            "position_ids": np.broadcast_to(np.arange(position, position + length), (batch, length)).copy(),
            "beam_idx": np.arange(batch, dtype=np.int32),
        }
        self.request.infer({name: value for name, value in values.items() if name in self.inputs}, share_inputs=True)
        return self.request.get_tensor("logits").data

    def start(self, batch: int, length: int) -> np.ndarray:
        """Empty the cache; a prompt."""
        self.request.reset_state()
        return np.array(protocol.prompt(batch, length, self.vocabulary), np.int64)

    def logits(self, tokens: list[int], prompt: int, out: str) -> None:
        self.request.reset_state()
        ids = np.array([tokens], np.int64)
        rows = [self.run(ids[:, :prompt], 0).copy()]
        rows += [self.run(ids[:, i : i + 1], i).copy() for i in range(prompt, len(tokens))]
        np.concatenate(rows, 1).astype(np.float32).tofile(out)

    def decode(self, batch: int, context: int, steps: int) -> float:
        self.run(self.start(batch, context), 0)
        ids = np.ones((batch, 1), np.int64)
        start = time.perf_counter()
        for step in range(steps):
            ids = self.run(ids, context + step)[:, -1].argmax(-1, keepdims=True)
        return time.perf_counter() - start

    def prefill(self, tokens: int) -> float:
        ids = self.start(1, tokens)
        start = time.perf_counter()
        self.run(ids, 0)
        return time.perf_counter() - start

    def generate(self, prompt: int, steps: int) -> float:
        return protocol.seconds_to_generate(self.model, torch.from_numpy(self.start(1, prompt)), steps)

    def serve(self, prompts: list[list[int]], outputs: list[int]) -> float:
        if self.pipeline is None:
            scheduler = openvino_genai.SchedulerConfig()
            scheduler.enable_prefix_caching = False
            scheduler.max_num_batched_tokens = BATCHED_TOKENS
            self.pipeline = openvino_genai.ContinuousBatchingPipeline(self.path, scheduler, "CPU", self.options)
        configs = []
        for tokens in outputs:
            config = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
            config.set_eos_token_id(0)  # it wants one, though it is to be ignored
            configs.append(config)
        inputs = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        start = time.perf_counter()
        results = self.pipeline.generate(inputs, configs)
        seconds = time.perf_counter() - start
        made = [len(result.m_generation_ids[0]) for result in results]
        if made != outputs:
            raise RuntimeError(f"generate made {made} tokens instead of {outputs}")
        return seconds

    def release(self) -> None:
        self.pipeline = None
        self.request.reset_state()


def last_token_only(model: openvino.Model) -> None:
    """Compute logits of a prompt's last token only, as openvino_genai changes exported models and all engines do."""
    (head,) = (op for op in model.get_ordered_ops() if op.get_type_name() == "MatMul" and feeds_result(op))
    last = opset.slice(head.input_value(0), np.array([-1]), np.array([np.iinfo(np.int64).max]), np.array([1]), [1])
    head.input(0).replace_source_output(last.output(0))
    model.validate_nodes_and_infer_types()


def feeds_result(op: openvino.Node) -> bool:
    """Whether the model's result is this operation's, or a conversion of it."""
    users = [target.get_node() for target in op.output(0).get_target_inputs()]
    return any(
        user.get_type_name() == "Result" or (user.get_type_name() == "Convert" and feeds_result(user)) for user in users
    )


def weight_bytes(model: openvino.Model) -> int:
    """Bytes of the model's constants but for the embedding's, which a step reads one row of."""
    constants = (op for op in model.get_ordered_ops() if op.get_type_name() == "Constant")
    return sum(op.get_byte_size() for op in constants if "embed_tokens" not in op.get_friendly_name())


if __name__ == "__main__":
    protocol.serve(OpenvinoModels())
