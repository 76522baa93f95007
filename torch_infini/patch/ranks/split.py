"""split: this rank's part of a model of transformers, cut as its class's plan for tensor parallelism (tp_plan) says.

Linear layers keep some rows or columns of their weights, experts some of their inner columns. Hooks combine the ranks'
results, so that whatever calls such a module, patched or not, gets that of the whole one. plan.py has plans for
classes without one, fused.py better cuts than theirs for some modules.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...distributed import TPGroup
from ..checks.verify import Verifier
from ..decoder import find_decoder
from ..layers.experts import Experts, ExpertsPlan, biases_of, has_experts, plans_of, share_experts, weights_of
from ..swap import Unsupported
from .additive import is_additive
from .cut import NAME, Cut, Range, part_of
from .fused import cut_delta_rule, cut_fused_heads, has_delta_heads, has_fused_heads
from .hooks import First, Gather, Sum
from .linear import Cuts, keep_columns, keep_rows
from .plan import Plan
from .whole_experts import OwnExperts

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


def split(model: PreTrainedModel, tp_group: TPGroup, expert_parallel: bool = False) -> dict[str, Cut]:
    """Make a model this rank's part of it.

    Every rank must split the model, and make the same calls of its part. Parameters on meta are replaced by smaller
    ones; others are copied in part.

    Args:
        model: A causal language model of transformers, not patched.
        tp_group: Its ranks.
        expert_parallel: Whether a rank has some experts of a mixture as a whole, and not some columns of each.

    Returns:
        The cut of each parameter that is not whole, by name, for a loader; a tied head's is not among them (tie_head).

    Raises:
        ValueError: For a model without a plan, a style of it that is unknown here, sizes that are no multiples of the
            ranks, or expert_parallel without experts that fused_experts computes.
    """
    cuts: dict[str, Cut] = {}
    parameters = dict(model.named_parameters())
    for name, cut in _Splitting(model, tp_group, expert_parallel).cuts():
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
    own = Cut(-2, part.rows).of(table.weight.detach()).clone()
    head._parameters["weight"] = nn.Parameter(own, requires_grad=False)


class _Splitting:
    """Changes the modules of a model to those of a rank, but for their parameters, whose cuts it yields."""

    def __init__(self, model: PreTrainedModel, tp_group: TPGroup, expert_parallel: bool) -> None:
        self.model, self.tp_group, self.plan, self.expert_parallel = model, tp_group, Plan(model), expert_parallel
        decoder = find_decoder(model)
        self.verifier = None if decoder is None else Verifier(decoder[1])
        self.done: set[str] = set()  # names of modules whose parts the plan does not cut
        self.configs: dict[int, Any] = {}  # of cut_fused_heads
        if not self.plan.has_layers:
            raise self.refusal("transformers has no plan (tp_plan) of it, and none follows from its layers' names")
        if expert_parallel and not any(map(has_experts, model.modules())):
            raise self.misplaced("the model has no experts that are known here")

    def refusal(self, why: str) -> ValueError:
        kind, size = type(self.model).__name__, self.tp_group.size
        return ValueError(f"{NAME}: tensor_parallel_size must be 1 for {kind}, because {why}, got {size}")

    def misplaced(self, why: str) -> ValueError:
        return ValueError(
            f"{NAME}: enable_expert_parallel must be left out for {type(self.model).__name__}, because {why}, got True"
        )

    def cuts(self) -> Cuts:
        """Yield (parameter, its cut) once."""
        for name, module in list(self.model.named_modules()):
            if name.rpartition(".")[0] in self.done and self.plan.get(name) != _ONCE:
                continue
            found = self.whole_module(name, module)
            if found is None:
                found = self.by_plan(name, module)
            else:
                self.done.add(name)
            yield from found
        for name, parameter in list(self.model.named_parameters()):
            style = self.plan.get(name)
            if style is None or style in _WHOLE or name.rpartition(".")[0] in self.done:
                continue
            if style not in _DIMENSIONS:
                raise self.refusal(f"the style {style!r} of {name}, a parameter, is unknown here")
            if name.endswith("gate_up_proj") and not style.startswith("packed"):
                raise self.refusal(f"its plan does not say which columns of {name} are gates")
            if parameter.dim() > 1 or not style.endswith("rowwise"):
                dim = max(_DIMENSIONS[style], -parameter.dim())
                yield name, self.cut_of(name, parameter, dim, 2 if style.startswith("packed") else 1)

    def whole_module(self, name: str, module: nn.Module) -> Cuts | None:
        """Return the cuts of a module that is cut otherwise than the plan says of its parts; None: as the plan says."""
        if has_experts(module) and self.expert_parallel:
            return self.share_experts(name, module, self.experts_of(module))
        if (experts := self.experts_of(module)) is not None and self.plan.names(name, *weights_of(module)):
            return self.split_experts(name, module, experts)
        styles = self.plan.of_parts(name, module)
        if not styles:
            return None
        if has_delta_heads(module):
            return cut_delta_rule(name, module, self.tp_group)
        if _COLUMN.get(styles.get("qkv_proj", "")) and has_fused_heads(module, self.tp_group):
            return cut_fused_heads(name, module, self.tp_group, self.configs)
        return self.mlp(name, module, styles)

    def mlp(self, name: str, module: nn.Module, styles: dict[str, str]) -> Cuts | None:
        """Return the cuts of an MLP, and none if its activation depends on all columns; None: it is no MLP, or as the
        plan says.
        """
        layers = {key: child for key, child in module._modules.items() if isinstance(child, nn.Linear)}
        outputs = [key for key in layers if styles.get(key) in _ROW]
        inputs = [key for key in layers if styles.get(key) in _COLUMN]
        others = [child for key, child in module._modules.items() if key not in layers and child is not None]
        if len(outputs) != 1 or {*inputs, *outputs} != set(layers) or any(list(one.parameters()) for one in others):
            return None
        inner = layers[outputs[0]].in_features
        halves = {layers[key].out_features // inner for key in inputs}
        if "q_proj" in inputs or halves not in ({1}, {2}):
            return None
        (count,) = halves
        additive = is_additive(module, inputs, outputs[0], count)
        if additive is None or (not additive and any(_COLUMN[styles[key]] for key in inputs)):
            return None if self.plan.is_of_class else iter(())
        if not additive:
            return iter(())
        return self.split_mlp(name, layers, inputs, outputs[0], count)

    def split_mlp(self, name: str, layers: dict[str, nn.Linear], inputs: list[str], output: str, halves: int) -> Cuts:
        """Leave an MLP some of its inner columns, and sum its results."""
        inner = layers[output].in_features
        own = Range(*self.tp_group.shard(f"the columns of {name}.{output}", inner))
        for key in inputs:
            yield from keep_rows(f"{name}.{key}", layers[key], *(own.after(i * inner) for i in range(halves)))
        yield from keep_columns(f"{name}.{output}", layers[output], self.tp_group)

    def by_plan(self, name: str, module: nn.Module) -> Cuts:
        style = self.plan.get(name)
        if style is None or style in _WHOLE:
            return
        if style in _SUMMED:
            module.register_forward_hook(Sum(self.tp_group))
        elif style == _ONCE:
            module.register_forward_pre_hook(First(self.tp_group.rank))
        elif isinstance(module, nn.Linear) and style in _COLUMN:
            yield from self.split_rows(name, module, _COLUMN[style])
        elif isinstance(module, nn.Linear) and style in _ROW:
            yield from keep_columns(name, module, self.tp_group, _ROW[style])
        else:
            raise self.refusal(f"the style {style!r} of {name}, a {type(module).__name__}, is unknown here")

    def cut_of(self, name: str, parameter: Tensor, dim: int, halves: int) -> Cut:
        size = parameter.shape[dim] // halves
        own = Range(*self.tp_group.shard(f"the columns of {name}", size))
        return Cut(dim, tuple(own.after(i * size) for i in range(halves)))

    def experts_of(self, module: nn.Module) -> ExpertsPlan | None:
        """Return what a module computes, if that are experts that are known here."""
        if self.verifier is None or not has_experts(module):
            return None
        with suppress(Unsupported):
            plan: ExpertsPlan = self.verifier.checked(module, Experts, plans_of(module))
            return plan
        return None

    def split_experts(self, name: str, module: nn.Module, plan: ExpertsPlan) -> Cuts:
        """Leave each expert some of its inner columns, and sum the results."""
        (first, second), (first_bias, second_bias) = weights_of(module), biases_of(module)
        inner = -1 if plan.transposed else -2
        halves = 2 if plan.has_gate and not plan.interleaved else 1
        parameters = {key: p for key, p in module._parameters.items() if p is not None}
        yield f"{name}.{first}", self.cut_of(f"{name}.{first}", parameters[first], inner, halves)
        yield f"{name}.{second}", self.cut_of(f"{name}.{second}", parameters[second], -3 - inner, 1)
        if first_bias in parameters:
            yield f"{name}.{first_bias}", self.cut_of(f"{name}.{first_bias}", parameters[first_bias], -1, halves)
        if second_bias in parameters and self.tp_group.rank:
            yield f"{name}.{second_bias}", Cut(-1, ())
        module.register_forward_hook(Sum(self.tp_group))

    def share_experts(self, name: str, module: nn.Module, plan: ExpertsPlan | None) -> Cuts:
        """Leave a mixture some of its experts, and sum the results; the router is whole on each rank."""
        if plan is None or plan.is_dense:
            what = "takes rows for all experts" if plan is not None else "is not computed by fused_experts"
            raise self.misplaced(f"{name} {what}")
        names = [key for key in (*weights_of(module), *biases_of(module)) if module._parameters.get(key) is not None]
        total = len(module.get_parameter(names[0]))
        own = Range(*self.tp_group.shard(f"the experts of {name}", total))
        share_experts(module, *own)
        for key in names:
            yield f"{name}.{key}", Cut(-module.get_parameter(key).dim(), (own,))
        module.register_forward_pre_hook(OwnExperts())
        module.register_forward_hook(Sum(self.tp_group))

    def split_rows(self, name: str, module: nn.Linear, gathers: bool) -> Cuts:
        """Leave a layer some of its outputs; `gathers`: its results are put together."""
        n = module.out_features
        if gathers:
            first, number, most = self.tp_group.shard_rows(n)
            if most * (self.tp_group.size - 1) >= n:  # a rank would have none
                return
            module.register_forward_hook(Gather(self.tp_group, n))
            own = Range(first, number)
        else:
            own = self.rows_of(name, n)
        yield from keep_rows(name, module, own)

    def rows_of(self, name: str, n: int) -> Range:
        """Return a rank's outputs of a layer: whole heads of the projections of q, k and v.

        Where there are fewer key heads than ranks, several ranks have the same one.
        """
        around, _, last = name.rpartition(".")
        attention = self.model.get_submodule(around)
        size = getattr(attention, "head_dim", None)
        if last not in ("q_proj", "k_proj", "v_proj") or not isinstance(size, int) or size < 1 or n % size:
            return Range(*self.tp_group.shard(f"the rows of {name}", n))
        heads = n // size
        if last == "q_proj":
            own = Range(*self.tp_group.shard(f"the heads of {name}", heads))
            set_heads(attention, ("num_heads", "num_attention_heads"), heads, own.number)
        else:
            own = Range(*self.tp_group.shard_or_replicate(f"the heads of {name}", heads))
            if last == "k_proj":
                set_heads(attention, ("num_key_value_heads", "num_kv_heads"), heads, own.number)
                groups = getattr(attention, "num_key_value_groups", None)
                if isinstance(groups, int) and heads < self.tp_group.size:
                    vars(attention)["num_key_value_groups"] = groups * heads // self.tp_group.size
        return own.times(size)


def set_heads(attention: nn.Module, names: tuple[str, ...], heads: int, number: int) -> None:
    """Set attributes that are the number of heads to this rank's."""
    for name in names:
        if vars(attention).get(name) == heads:
            vars(attention)[name] = number
