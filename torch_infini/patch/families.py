"""The table of model families: how a structure is recognised, and which patched class serves which of its modules.

A family is recognised by the names of its modules and attributes, not by import path, which changes with every release;
each patched module's numbers are then checked (verify.py), so that a look-alike with another formula is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .modules import Attention, DecoderLayer, GatedMLP, Linear, RMSNorm, RotaryEmbedding
from .report import pattern
from .swap import Patched


@dataclass(frozen=True)
class Family:
    """One structure.

    Attributes:
        name: As the report calls it.
        models: Classes of transformers that have it, for messages.
        others: Names of the decoder's modules that are needed, but not replaced; * stands for a layer's number.
        rules: Names of those that are replaced, and by what; a module stands behind the modules it contains.
        head: The module beside the decoder that makes logits.
    """

    name: str
    models: tuple[str, ...]
    others: frozenset[str]
    rules: tuple[tuple[str, type[Patched]], ...]
    head: tuple[str, type[Patched]]

    def is_decoder(self, module: nn.Module) -> bool:
        """Whether the module has exactly this structure; what lies inside the innermost named modules is free."""
        wanted = self.others | {name for name, _ in self.rules}
        inner = {name for name in wanted if not any(other.startswith(f"{name}.") for other in wanted)}
        parents = lambda name: {name[:i] for i, letter in enumerate(name) if letter == "."}
        found = {}
        for name, child in module.named_modules(remove_duplicate=False):
            if name and not parents(pattern(name)) & inner:
                found[pattern(name)] = child
        reads = [(name, attribute) for name, patch in self.rules for attribute in patch.infini_reads]
        if found.keys() != wanted or not hasattr(module, "config"):
            return False
        return all(hasattr(found[name], attribute) for name, attribute in reads)

    def find_decoder(self, model: nn.Module) -> tuple[str, nn.Module] | None:
        """(prefix of its modules' names, decoder): the model itself or one of its children."""
        children = ((f"{name}.", child) for name, child in model.named_children())
        return next(((prefix, m) for prefix, m in [("", model), *children] if self.is_decoder(m)), None)


def layer(*names: str) -> frozenset[str]:
    return frozenset(f"layers.*.{name}" for name in names)


LLAMA = Family(
    name="LLaMA",
    models=("LlamaForCausalLM", "LlamaModel"),
    others=frozenset({"embed_tokens", "layers"})
    | layer("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    | layer("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.act_fn"),
    rules=(
        ("rotary_emb", RotaryEmbedding),
        ("layers.*.input_layernorm", RMSNorm),
        ("layers.*.post_attention_layernorm", RMSNorm),
        ("layers.*.self_attn", Attention),
        ("layers.*.mlp", GatedMLP),
        ("layers.*", DecoderLayer),
        ("norm", RMSNorm),
    ),
    head=("lm_head", Linear),
)

FAMILIES = (LLAMA,)
