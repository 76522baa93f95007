"""The layers of LLaMA-type models, for inference: modules that call infini ops and nothing else.

They work on a Batch (the new tokens of one or more sequences, concatenated) and a KVCache, paged or static.
"""

from .attention import Attention
from .batch import Batch
from .cache import KVCache, LayerCache, MixedKVCache
from .embedded_prompt import EmbeddedPrompt, EmbeddedRows, Term
from .layer import DecoderLayer, DecoderLayers
from .linear import Embedding, Linear
from .lora import Adapters, LoRAFactors, LoRASite
from .merged_linear import MergedLinear
from .mlp import SwiGLU
from .norm import RMSNorm
from .rotary import RotaryEmbedding, RotarySwitch

__all__ = [
    "Adapters",
    "Attention",
    "Batch",
    "DecoderLayer",
    "DecoderLayers",
    "EmbeddedPrompt",
    "EmbeddedRows",
    "Embedding",
    "KVCache",
    "LayerCache",
    "Linear",
    "LoRAFactors",
    "LoRASite",
    "MergedLinear",
    "MixedKVCache",
    "RMSNorm",
    "RotaryEmbedding",
    "RotarySwitch",
    "SwiGLU",
    "Term",
]
