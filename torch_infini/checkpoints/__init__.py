"""Reads checkpoints: folders of safetensors, GGUF files and names on the Hugging Face hub, dense or quantized.

open_checkpoint reads config, tensors and quantized layers; each format's layout and formula is a class of its own.
"""

from .agreement import Wanted, check_layers, check_tensors, is_derived
from .description import QuantizedLayer, layers_of
from .expert_layers import ModelExperts, join_experts
from .experts import DENSE, ExpertsFormat, StoredExperts
from .files import files_of, read_header, read_object, read_tensors, write_tensors
from .fill import Layer, Projection, fill
from .gguf_file import has_tokenizer as has_gguf_tokenizer
from .hub import find, is_hub_name
from .lora import LoRALayer, LoRAWeights, read_lora
from .reader import Activations, Checkpoint, config_values, is_foreign, method_of, open_checkpoint
from .saved import StoredLayer, saved_layers
from .weight import LinearWeight, StoredFormat, Target, TensorInfo

__all__ = [
    "DENSE",
    "Activations",
    "Checkpoint",
    "StoredFormat",
    "ExpertsFormat",
    "ModelExperts",
    "StoredExperts",
    "StoredLayer",
    "QuantizedLayer",
    "LinearWeight",
    "LoRALayer",
    "LoRAWeights",
    "Target",
    "TensorInfo",
    "Wanted",
    "check_layers",
    "check_tensors",
    "Layer",
    "Projection",
    "files_of",
    "config_values",
    "fill",
    "find",
    "has_gguf_tokenizer",
    "is_derived",
    "is_foreign",
    "is_hub_name",
    "join_experts",
    "layers_of",
    "method_of",
    "open_checkpoint",
    "read_header",
    "read_lora",
    "read_object",
    "read_tensors",
    "saved_layers",
    "write_tensors",
]
