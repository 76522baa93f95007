"""split: this rank's part of a model of transformers, cut as its class's plan for tensor parallelism (tp_plan) says.

Linear layers keep some rows or columns of their weights, experts some of their inner columns. Hooks combine the ranks'
results, so that whatever calls such a module, patched or not, gets that of the whole one. split_plan.py has plans for
classes without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..distributed import TPGroup
from .checks.verify import Verifier
from .decoder import find_decoder
from .layers.experts import Experts, ExpertsPlan, biases_of, has_experts, plans_of, weights_of
from .layers.mlp import SPARSITY
from .rank_hooks import First, Gather, Sum, Take
from .split_plan import generic, plan_of
from .swap import Unsupported

NAME = "torch_infini.LLM"
_PART = "_infini_part"  # attribute of a module: its Part

# What a plan's styles mean (https://huggingface.co/docs/transformers/main/en/perf_infer_gpu_multi): of a module, how
# its results are combined; of a parameter, which dimension is cut.
_WHOLE = {  # computed by each rank as it is: for inference, or because a table that is only looked up costs no time
    *("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params"),
    *("embedding_rowwise", "embedding_colwise"),
}
_SUMMED = {"moe_tp_experts", "all_reduce"}  # of modules whose parameters the plan cuts
_ONCE = "moe_identity_expert"  # of a module whose result is summed over the ranks and that each has whole
_COLUMN = {"colwise": False, "colwise_gather_output": True, "colwise_rep": True}  # whether results are gathered
_ROW = {"rowwise": False, "rowwise_split_input": True, "rowwise_rep": True}  # whether the input is whole
_DIMENSIONS = {"colwise": -2, "packed_colwise": -2, "rowwise": -1, "packed_rowwise": -1}


class Cut(NamedTuple):
    """The part of a tensor that a rank holds.

    Attributes:
        dim: The dimension that is cut, negative; 0: the tensor is whole on rank 0, and zeros on the others.
        first: The first of its entries that the rank holds, of each half if there are two. If dim is 0, the rank.
        number: How many it holds, of each half likewise.
        halves: 1, or 2: the dimension is two halves, of which each is cut.
    """

    dim: int
    first: int
    number: int = 0
    halves: int = 1

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of a whole tensor, a view if possible."""
        if not self.dim:
            return torch.zeros_like(tensor) if self.first else tensor
        parts = [half.narrow(self.dim, self.first, self.number) for half in tensor.chunk(self.halves, self.dim)]
        return parts[0] if self.halves == 1 else torch.cat(parts, self.dim)

    def of_blocks(self, blocks: Tensor, elements: int, transposed: bool) -> Tensor:
        """Return the part of experts' weights [experts, n, k / elements, bytes]; `dim` is of [experts, n, k], or, if
        transposed, of [experts, k, n].

        Raises:
            ValueError: If ranks would have parts of a block.
        """
        if (self.dim == -1) == transposed:
            return Cut(-3, *self[1:]).of(blocks)
        if self.first % elements or self.number % elements:
            raise ValueError(
                f"{NAME}: ranks must not cut the blocks of {elements} numbers, got {self.number} columns of each: use "
                "another tensor_parallel_size"
            )
        return Cut(-2, self.first // elements, self.number // elements).of(blocks)


class Part(NamedTuple):
    """The part of a linear layer's weight that a rank holds.

    Attributes:
        rows: Of the weight [n, k].
        columns: Likewise.
        shape: (n, k) of the whole weight.
    """

    rows: slice
    columns: slice
    shape: tuple[int, int]


def part_of(module: nn.Module) -> Part | None:
    """Return the part of a linear layer that this rank has; None for one that is whole."""
    part: Part | None = vars(module).get(_PART)
    return part


def split(model: PreTrainedModel, tp_group: TPGroup) -> dict[str, Cut]:
    """Make a model this rank's part of it.

    Every rank must split the model, and make the same calls of its part. Parameters on meta are replaced by smaller
    ones; others are copied in part.

    Args:
        model: A causal language model of transformers, not patched.
        tp_group: Its ranks.

    Returns:
        The cut of each parameter that is not whole, by name, for a loader; a tied head's is not among them (tie_head).

    Raises:
        ValueError: For a model without a plan, a style of it that is unknown here, or sizes that are no multiples of
            the ranks.
    """
    cuts: dict[str, Cut] = {}
    parameters = dict(model.named_parameters())
    for name, cut in _Splitting(model, tp_group).cuts():
        if name not in parameters:  # a tied head's
            continue
        around, _, last = name.rpartition(".")
        with torch.no_grad():
            own = cut.of(parameters[name].detach()).clone()
        model.get_submodule(around)._parameters[last] = nn.Parameter(own, requires_grad=False)
        cuts[name] = cut
    return cuts


def is_tied(model: PreTrainedModel) -> bool:
    """Return whether the head's weight is that of the embedding."""
    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is head), None)
    return f"{name}.weight" in (getattr(model, "all_tied_weights_keys", None) or {})


def tie_head(model: PreTrainedModel) -> None:
    """Let the head of a model that was split and loaded be a copy of this rank's rows of the embedding, if the two are
    tied.
    """
    head = model.get_output_embeddings()
    part = None if head is None else part_of(head)
    if part is None or not is_tied(model):
        return
    table: Any = model.get_input_embeddings()
    head._parameters["weight"] = nn.Parameter(table.weight.detach()[part.rows].clone(), requires_grad=False)


class _Splitting:
    """Changes the modules of a model to those of a rank, but for their parameters, whose cuts it yields."""

    def __init__(self, model: PreTrainedModel, tp_group: TPGroup) -> None:
        self.model, self.tp_group, self.plan = model, tp_group, plan_of(model)
        decoder = find_decoder(model)
        self.verifier = None if decoder is None else Verifier(decoder[1])
        if not any("." in name for name in self.plan):
            why = "transformers has no plan (tp_plan) of it, and none follows from its layers' names"
            raise self.refusal(why)

    def refusal(self, why: str) -> ValueError:
        kind, size = type(self.model).__name__, self.tp_group.size
        return ValueError(f"{NAME}: tensor_parallel_size must be 1 for {kind}, because {why}, got {size}")

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        """Yield (parameter, its cut) once."""
        done: set[str] = set()  # names of experts, whose parameters follow from what they compute
        for name, module in list(self.model.named_modules()):
            style = self.plan.get(generic(name))
            experts = self.experts_of(module)
            if experts is not None and self.is_cut(name, module):
                done.add(name)
                yield from self.split_experts(name, module, experts)
            elif style is None or style in _WHOLE or _is_sparse(self.model, name):
                pass
            elif style in _SUMMED:
                module.register_forward_hook(Sum(self.tp_group))
            elif style == _ONCE:
                module.register_forward_pre_hook(First(self.tp_group.rank))
            elif isinstance(module, nn.Linear) and style in _COLUMN:
                yield from self.split_rows(name, module, _COLUMN[style])
            elif isinstance(module, nn.Linear) and style in _ROW:
                yield from self.split_columns(name, module, _ROW[style])
            else:
                raise self.refusal(f"the style {style!r} of {name}, a {type(module).__name__}, is unknown here")
        for name, parameter in list(self.model.named_parameters()):
            style = self.plan.get(generic(name))
            if style is None or style in _WHOLE or name.rpartition(".")[0] in done:
                continue
            if style not in _DIMENSIONS:
                raise self.refusal(f"the style {style!r} of {name}, a parameter, is unknown here")
            if name.endswith("gate_up_proj") and not style.startswith("packed"):
                raise self.refusal(f"its plan does not say which columns of {name} are gates")
            if parameter.dim() > 1 or not style.endswith("rowwise"):
                dim = max(_DIMENSIONS[style], -parameter.dim())
                yield name, self.cut_of(name, parameter, dim, 2 if style.startswith("packed") else 1)

    def cut_of(self, name: str, parameter: Tensor, dim: int, halves: int) -> Cut:
        return Cut(dim, *self.tp_group.shard(f"the columns of {name}", parameter.shape[dim] // halves), halves)

    def experts_of(self, module: nn.Module) -> ExpertsPlan | None:
        """Return what a module computes, if that are experts that are known here."""
        if self.verifier is None or not has_experts(module):
            return None
        with suppress(Unsupported):
            plan: ExpertsPlan = self.verifier.checked(module, Experts, plans_of(module))
            return plan
        return None

    def is_cut(self, name: str, module: nn.Module) -> bool:
        """Return whether the plan names experts' weights."""
        return any(generic(f"{name}.{weight}") in self.plan for weight in weights_of(module))

    def split_experts(self, name: str, module: nn.Module, plan: ExpertsPlan) -> Iterator[tuple[str, Cut]]:
        """Leave each expert some of its inner columns, and sum the results."""
        (first, second), (first_bias, second_bias) = weights_of(module), biases_of(module)
        inner = -1 if plan.transposed else -2
        halves = 2 if plan.has_gate and not plan.interleaved else 1
        parameters = {key: p for key, p in module._parameters.items() if p is not None}
        yield f"{name}.{first}", self.cut_of(f"{name}.{first}", parameters[first], inner, halves)
        yield f"{name}.{second}", self.cut_of(f"{name}.{second}", parameters[second], -3 - inner, 1)
        if first_bias in parameters:
            yield f"{name}.{first_bias}", self.cut_of(f"{name}.{first_bias}", parameters[first_bias], -1, halves)
        if second_bias in parameters:
            yield f"{name}.{second_bias}", Cut(0, self.tp_group.rank)
        module.register_forward_hook(Sum(self.tp_group))

    def split_rows(self, name: str, module: nn.Linear, gathers: bool) -> Iterator[tuple[str, Cut]]:
        """Leave a layer some of its outputs; `gathers`: its results are put together."""
        n, k = module.out_features, module.in_features
        if gathers:
            first, number, most = self.tp_group.shard_rows(n)
            if most * (self.tp_group.size - 1) >= n:  # a rank would have none
                return
            module.register_forward_hook(Gather(self.tp_group, n))
        else:
            first, number = self.rows_of(name, n)
        module.out_features = number
        vars(module)[_PART] = Part(slice(first, first + number), slice(0, k), (n, k))
        yield f"{name}.weight", Cut(-2, first, number)
        if module.bias is not None:
            yield f"{name}.bias", Cut(-1, first, number)

    def rows_of(self, name: str, n: int) -> tuple[int, int]:
        """Return (first, number) of a rank's outputs of a layer: whole heads of the projections of q, k and v.

        Where there are fewer key heads than ranks, several ranks have the same one.
        """
        around, _, last = name.rpartition(".")
        attention = self.model.get_submodule(around)
        size = getattr(attention, "head_dim", None)
        if last not in ("q_proj", "k_proj", "v_proj") or not isinstance(size, int) or size < 1 or n % size:
            return self.tp_group.shard(f"the rows of {name}", n)
        heads = n // size
        if last == "q_proj":
            first, number = self.tp_group.shard(f"the heads of {name}", heads)
            self.set_heads(attention, ("num_heads", "num_attention_heads"), heads, number)
        else:
            first, number = self.tp_group.shard_or_replicate(f"the heads of {name}", heads)
            if last == "k_proj":
                self.set_heads(attention, ("num_key_value_heads", "num_kv_heads"), heads, number)
                groups = getattr(attention, "num_key_value_groups", None)
                if isinstance(groups, int) and heads < self.tp_group.size:
                    vars(attention)["num_key_value_groups"] = groups * heads // self.tp_group.size
        return first * size, number * size

    def set_heads(self, attention: nn.Module, names: tuple[str, ...], heads: int, number: int) -> None:
        """Set attributes that are the number of heads to this rank's."""
        for name in names:
            if vars(attention).get(name) == heads:
                vars(attention)[name] = number

    def split_columns(self, name: str, module: nn.Linear, takes: bool) -> Iterator[tuple[str, Cut]]:
        """Leave a layer some of its inputs, and sum its results; `takes`: it is called with all of them."""
        n, k = module.out_features, module.in_features
        first, number = self.tp_group.shard(f"the columns of {name}", k)
        if takes:
            module.register_forward_pre_hook(Take(first, number))
        module.register_forward_hook(Sum(self.tp_group))
        module.in_features = number
        vars(module)[_PART] = Part(slice(0, n), slice(first, first + number), (n, k))
        yield f"{name}.weight", Cut(-1, first, number)
        if module.bias is not None:
            yield f"{name}.bias", Cut(0, self.tp_group.rank)


def _is_sparse(model: nn.Module, name: str) -> bool:
    """Return whether a layer is of an MLP whose activation depends on all columns (Gemma 3n's), which stays whole."""
    around, _, _ = name.rpartition(".")
    return bool(around) and bool(getattr(model.get_submodule(around), SPARSITY, 0))
