"""infinilm.models.llama: engines for llama, mistral, qwen2 and qwen3 models, and their config."""

from ...config import LlamaConfig
from .auto import AutoLlamaModel, LlamaForCausalLM

__all__ = ["AutoLlamaModel", "LlamaConfig", "LlamaForCausalLM"]
