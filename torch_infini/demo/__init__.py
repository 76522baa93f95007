"""The demo: a small trained LLaMA, measured before and after patch_model.

benchmarks/train_demo.py trained it on Python's own help.

MODEL is that model's folder, for everything that takes a Hugging Face folder: LLM(MODEL), from_pretrained(MODEL).
"""

import os

__all__ = ["MODEL"]

MODEL: str = os.path.join(os.path.dirname(os.path.abspath(__file__)), "model")
