"""The demo: a small real LLaMA (trained by train.py on the text of Python's own help) before and after patch_model."""

from .run import run_demo

__all__ = ["run_demo"]
