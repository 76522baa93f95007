"""Dense decoders with names or norms of their own.

OLMo, Phi 2, EXAONE, Seed, StarCoder, StableLM, GLM, Command R, LFM2, Hunyuan, Nemotron, Jais 2, ERNIE.
"""

from __future__ import annotations

from typing import Any

from ..architecture import POST_NAMES, Architecture, Metadata, decoder, interleaved, rope, sizes, without_one
from ..method import NAME


def _olmo(m: Metadata) -> dict[str, Any]:
    """Its norms have no weights, and an eps of 1e-5 in transformers."""
    return {
        "model_type": "olmo",
        **sizes(m),
        "clip_qkv": m.get("attention.clamp_kqv"),
        "attention_bias": "blk.0.attn_q.bias" in m,
        "rope_parameters": rope(m),
    }


def _phi2(m: Metadata) -> dict[str, Any]:
    return {
        "model_type": "phi",
        **sizes(m),
        "layer_norm_eps": m["attention.layer_norm_epsilon"],
        "hidden_act": "gelu_new",
        "rope_parameters": rope(m, partial=True),
    }


def _olmo2(m: Metadata) -> dict[str, Any]:
    window = m.get("attention.sliding_window")
    if not window:
        return decoder(m, "olmo2")
    # Full layers alone scale their positions.
    parameters = rope(m)
    local = {"rope_type": "default", "rope_theta": parameters["rope_theta"]}
    by_type = {"sliding_attention": local, "full_attention": parameters}
    return {**decoder(m, "olmo3"), "sliding_window": window, "rope_parameters": by_type}


def _exaone(m: Metadata) -> dict[str, Any]:
    return decoder(m, "exaone")


def _exaone4(m: Metadata) -> dict[str, Any]:
    window = m.get("attention.sliding_window")
    layers = m.size("block_count")
    types = ["sliding_attention" if window and (i + 1) % 4 else "full_attention" for i in range(layers)]
    return {**decoder(m, "exaone4"), "sliding_window": window, "layer_types": types}


def _seed_oss(m: Metadata) -> dict[str, Any]:
    return {**decoder(m, "seed_oss"), "attention_out_bias": "blk.0.attn_output.bias" in m}


def _starcoder2(m: Metadata) -> dict[str, Any]:
    return {
        "model_type": "starcoder2",
        **sizes(m),
        "norm_epsilon": m["attention.layer_norm_epsilon"],
        "use_bias": "blk.0.ffn_up.bias" in m,
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": m.get("attention.sliding_window"),
        "rope_parameters": rope(m),
    }


def _stablelm(m: Metadata) -> dict[str, Any]:
    if "blk.0.attn_q_norm.weight" in m:
        raise NotImplementedError(f"{NAME}: a stablelm in {m.path} must have no norms of q and k, got attn_q_norm")
    return {
        "model_type": "stablelm",
        **sizes(m),
        "layer_norm_eps": m["attention.layer_norm_epsilon"],
        "use_qkv_bias": "blk.0.attn_q.bias" in m,
        "use_parallel_residual": bool(m.get("use_parallel_residual", False)) and "blk.0.ffn_norm.weight" not in m,
        "rope_parameters": rope(m, partial=True),
    }


def _glm4(m: Metadata) -> dict[str, Any]:
    if m.get("rope.dimension_sections"):
        raise NotImplementedError(
            f"{NAME}: a glm4 in {m.path} must be of a text model, whose heads are in the model's order, got "
            "rope.dimension_sections"
        )
    return {**decoder(m, "glm4"), "rope_parameters": rope(m, partial=True)}


def _command_r(m: Metadata) -> dict[str, Any]:
    return {
        "model_type": "cohere",
        **sizes(m),
        "layer_norm_eps": m["attention.layer_norm_epsilon"],
        "logit_scale": m["logit_scale"],
        "use_qk_norm": "blk.0.attn_q_norm.weight" in m,
        "attention_bias": "blk.0.attn_q.bias" in m,
        "rope_parameters": rope(m),
    }


def _cohere2(m: Metadata) -> dict[str, Any]:
    more = {"head_dim": m.head_dim, "sliding_window": m["attention.sliding_window"]}
    return {**_command_r(m), "model_type": "cohere2", **more}


def lfm2(m: Metadata, model_type: str = "lfm2") -> dict[str, Any]:
    kv = m["attention.head_count_kv"]  # of each layer; 0: a convolution
    layers = m.size("block_count")
    if not isinstance(kv, list) or len(kv) != layers:
        raise ValueError(
            f"{NAME}: {m.architecture}.attention.head_count_kv in {m.path} must have an entry for each of {layers} "
            f"layers, got {kv}"
        )
    return {
        "model_type": model_type,
        **sizes(m),
        "num_key_value_heads": max(kv),
        "norm_eps": m["attention.layer_norm_rms_epsilon"],
        "conv_L_cache": m.size("shortconv.l_cache"),
        "conv_bias": "blk.0.shortconv.conv.bias" in m,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["full_attention" if heads else "conv" for heads in kv],
        "full_attn_idxs": [i for i, heads in enumerate(kv) if heads],
        "rope_parameters": rope(m),
    }


def _hunyuan(m: Metadata) -> dict[str, Any]:
    return decoder(m, "hunyuan_v1_dense")


def _squared_relu(m: Metadata, model_type: str) -> dict[str, Any]:
    """Of decoders with LayerNorm and an MLP without gate."""
    return {
        "model_type": model_type,
        **sizes(m),
        "head_dim": m.head_dim,
        "hidden_act": "relu2",
        "attention_bias": "blk.0.attn_q.bias" in m,
        "mlp_bias": "blk.0.ffn_up.bias" in m,
    }


def _nemotron(m: Metadata) -> dict[str, Any]:
    more = {"norm_eps": m["attention.layer_norm_epsilon"], "rope_parameters": rope(m, partial=True)}
    return {**_squared_relu(m, "nemotron"), **more}


def _jais2(m: Metadata) -> dict[str, Any]:
    more = {"layer_norm_eps": m["attention.layer_norm_epsilon"], "rope_parameters": rope(m)}
    return {**_squared_relu(m, "jais2"), **more}


def _ernie4_5(m: Metadata) -> dict[str, Any]:
    return {**decoder(m, "ernie4_5"), "use_bias": "blk.0.attn_q.bias" in m}


_PHI2_NAMES = {
    "output_norm": "model.final_layernorm",
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
LFM2_NAMES = {
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.embedding_norm",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_GLM4_NAMES = {
    "ffn_up": "mlp.gate_up_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}

_HUNYUAN_NAMES = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}

ARCHITECTURES = (
    Architecture("olmo", _olmo, rows=interleaved),
    Architecture("phi2", _phi2, _PHI2_NAMES),
    Architecture("olmo2", _olmo2, POST_NAMES),
    Architecture("exaone", _exaone),
    Architecture("exaone4", _exaone4, POST_NAMES),
    Architecture("seed_oss", _seed_oss, {"post_attention_norm": "post_attention_layernorm"}),
    Architecture("starcoder2", _starcoder2, {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    Architecture("stablelm", _stablelm),
    Architecture("glm4", _glm4, _GLM4_NAMES),
    Architecture("command-r", _command_r),
    Architecture("cohere2", _cohere2),
    Architecture("hunyuan-dense", _hunyuan, _HUNYUAN_NAMES),
    Architecture("nemotron", _nemotron, values=without_one),
    Architecture("jais2", _jais2),
    Architecture("ernie4_5", _ernie4_5),
    Architecture("lfm2", lfm2, LFM2_NAMES, added={"conv.conv.weight": 1}),
)
