"""Plan: how the ranks of tensor parallelism share a model of transformers, by the names of its modules.

It is the plan of the model's class; for one without, what follows from the structure of its attention and MLPs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from ..layers.experts import has_experts, weights_of

_INPUTS = ("q_proj", "k_proj", "v_proj")
_OUTPUTS = ("o_proj", "out_proj", "dense")  # names of attention's last layer
# MLPs: the layers before the activation, and the one after it.
_MLPS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("up_proj",), "down_proj"),
)
_OF_HEADS = ("sinks",)  # parameters of attention with an entry for each head


def generic(name: str) -> str:
    """Return a module's or parameter's name with the numbers of layers as a plan has them: *."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


class Plan:
    """The style of each module and parameter that ranks share: names and styles are those of transformers' tp_plan.

    Args:
        model: A causal language model of transformers.

    Attributes:
        styles: By the name, with * for the numbers of layers.
        is_of_class: Whether the plan is that of the model's class, and does not follow from names alone.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.styles: dict[str, str] = dict(model.tp_plan)
        self.is_of_class = self.has_layers
        if not self.is_of_class:
            self._derive(model)

    @property
    def has_layers(self) -> bool:
        """Whether anything but the embedding and the head is shared."""
        return any("*" in name for name in self.styles)

    def get(self, name: str) -> str | None:
        """Return the style of a module or parameter."""
        return self.styles.get(generic(name))

    def names(self, module: str, *parameters: str) -> bool:
        """Return whether a module's parameters of these names, or one of them, have a style."""
        return any(self.get(f"{module}.{parameter}") is not None for parameter in parameters)

    def of_parts(self, name: str, module: nn.Module) -> dict[str, str]:
        """Return the styles of a module's direct parts, by their names in it."""
        found = {part: self.get(f"{name}.{part}") for part in module._modules}
        return {part: style for part, style in found.items() if style is not None}

    def _derive(self, model: PreTrainedModel) -> None:
        for name, module in model.named_modules():
            for part, style in (*_of_attention(module), *_of_mlp(module), *_of_experts(module)):
                self.styles[generic(f"{name}.{part}")] = style
        head = model.get_output_embeddings()
        names = [name for name, module in model.named_modules() if module is head]
        if self.styles and isinstance(head, nn.Linear):
            self.styles[generic(names[0])] = "colwise_gather_output"


def _of_attention(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the styles of attention's layers, if all it has beside them is of heads."""
    size, children = getattr(module, "head_dim", None), module._modules
    output = next((name for name in _OUTPUTS if isinstance(children.get(name), nn.Linear)), None)
    if output is None or not isinstance(size, int) or not all(isinstance(children.get(n), nn.Linear) for n in _INPUTS):
        return
    known = {*_INPUTS, output}
    for name, child in children.items():  # norms of each head
        if child is not None and name not in known and any(p.numel() != size for p in child.parameters()):
            return
    if any(name not in _OF_HEADS for name, p in module._parameters.items() if p is not None):
        return
    yield from ((name, "colwise") for name in _INPUTS)
    yield output, "rowwise"
    yield from ((name, "colwise") for name in _OF_HEADS if module._parameters.get(name) is not None)


def _of_mlp(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the styles of an MLP's layers, if all it has beside them is an activation."""
    children = {name: child for name, child in module._modules.items() if child is not None}
    for inputs, output in _MLPS:
        layers = {*inputs, output}
        if not all(isinstance(children.get(name), nn.Linear) for name in layers):
            continue
        others = [child for name, child in children.items() if name not in layers]
        if not any(list(child.parameters()) for child in others):
            yield from ((name, "colwise") for name in inputs)
            yield output, "rowwise"
        return


def _of_experts(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of experts' weights, for split.py, which cuts those that are known."""
    if has_experts(module):
        yield from ((name, "replicate") for name in weights_of(module))
