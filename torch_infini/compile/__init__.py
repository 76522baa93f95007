"""The backend "infini" of torch.compile: infini ops for formulas that it finds in a graph, Inductor for the rest.

The model is not changed. last_report() and the log "torch_infini.compile" say what was replaced, and why not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from .._core.devices import backing_type
from ..ops import REGISTRY, chosen_providers
from . import lowering
from .graph import make_positional
from .patterns import PATTERNS
from .report import Report

__all__ = ["DECOMPOSED", "PATTERN_NAMES", "Report", "backend", "last_report", "replace_patterns"]

log = logging.getLogger("torch_infini.compile")

PATTERN_NAMES = tuple(name for pattern in PATTERNS for name in pattern.names)

# Ops of torch.ops.infini that are decomposed into aten ops, so that Inductor can fuse them with neighbours. Ops with an
# exponential stay calls: their kernels are up to four times as fast as Inductor's code for the formula, more than
# fusion gains (benchmarks/decompose.py).
DECOMPOSED = ("add", "clip", "mul", "ones", "relu", "sub", "zeros")

_reports: list[Report] = []


def last_report() -> Report | None:
    """Return the report of the last graph compiled in this process; None before the first."""
    return _reports[-1] if _reports else None


def replace_patterns(graph_module: GraphModule, patterns: Sequence[str] = PATTERN_NAMES) -> Report:
    """Replace formulas by infini ops in a graph that Dynamo captured, in place.

    Args:
        graph_module: A graph as passed to a torch.compile backend: torch calls, with an "example_value" for each node.
        patterns: The formulas to replace; all by default.

    Returns:
        The report: the sites found, replaced and left.

    Raises:
        ValueError: For an unknown pattern.
    """
    patterns = (patterns,) if isinstance(patterns, str) else patterns
    unknown = sorted(set(patterns) - set(PATTERN_NAMES))
    if unknown:
        raise ValueError(f"torch_infini.compile: patterns must be among {', '.join(PATTERN_NAMES)}, got {unknown[0]!r}")
    report = Report()
    make_positional(graph_module.graph)
    for pattern in PATTERNS:
        pattern.apply(graph_module.graph, report, frozenset(patterns))
    graph_module.graph.lint()
    graph_module.recompile()
    return report


def backend(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph: the backend "infini" of torch.compile.

    Args:
        graph_module: The graph that Dynamo captured.
        example_inputs: Its inputs.
        mode: As for backend="inductor".
        options: "patterns": the names of the formulas to replace (default: PATTERN_NAMES, all). "decompose": the names
            of the infini ops to decompose into aten ops (default: DECOMPOSED without those that a provider computes).
            Any other option is passed to Inductor.

    Returns:
        A callable that runs the graph.

    Raises:
        ValueError: For an unknown pattern, or an op that has no decomposition.
    """
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    options = dict(options or {})
    patterns, decompose = options.pop("patterns", PATTERN_NAMES), options.pop("decompose", None)
    if decompose is None:
        chosen = {provider.op for provider in chosen_providers()}
        decompose = [name for name in DECOMPOSED if name not in chosen]
    decompositions = {}
    for name in decompose:
        spec = REGISTRY.get(name)
        if spec is None or spec.decomposition is None:
            raise ValueError(f"torch_infini.compile: decompose must name ops that have a decomposition, got {name!r}")
        decompositions[spec.op] = spec.decomposition
    lowering.register()
    reason = no_replacement(graph_module, example_inputs)
    report = Report(skipped=reason) if reason else replace_patterns(graph_module, patterns)
    _reports[:] = [report]
    log.info("backend infini: %s", "; ".join(report.lines()) or report)
    compiled = compile_fx(
        graph_module,
        list(example_inputs),
        config_patches={**(list_mode_options(mode) if mode else {}), **options} or None,
        decompositions={**select_decomp_table(), **decompositions},
    )
    assert callable(compiled)  # only ahead-of-time compilation returns file names
    return compiled


def no_replacement(graph_module: GraphModule, example_inputs: Sequence[Any]) -> str | None:
    """Return why infini ops cannot be used in the graph at all; None if they can."""
    tensors = [t for t in (*example_inputs, *graph_module.parameters()) if isinstance(t, Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "gradients may be required, and infini ops have none (call it under torch.no_grad())"
    supported = REGISTRY["rms_norm"].backends
    if any(backing_type(t.device) not in supported for t in tensors):
        return f"it is not on a device that has kernels ({', '.join(supported)})"
    if any(torch.is_autocast_enabled(device) for device in {*supported, *(t.device.type for t in tensors)}):
        return "autocast is on"
    return None
