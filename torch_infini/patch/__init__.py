"""patch_model, which replaces layers of one transformers model instance by infini ops, and unpatch_model.

Reading order: apply.py (the steps), structure.py (the candidates), layers/ (the patched modules), replacement.py (those
of users), checks/ (numerical checks), state.py, files/.
Importing this module is cheap: transformers is imported by the first call of patch_model.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from .decoder import find_decoder
from .options import PACKED, check_weights, patterns
from .replacement import Replacement, register, unregister
from .report import Budget, PatchReport, Row, Verification
from .swap import STATE, Patched

if TYPE_CHECKING:
    from .description import Description
    from .files.config import InfiniConfig

__all__ = [
    "Budget",
    "InfiniConfig",
    "PatchReport",
    "Replacement",
    "Row",
    "Verification",
    "describe",
    "is_patched",
    "load_model",
    "load_patched",
    "patch_model",
    "patched",
    "register",
    "save_patched",
    "unpatch_model",
    "unregister",
]


PATCH = "torch_infini.patch_model"
TRANSFORMERS = "transformers>=5,<5.25"  # what to install: the releases that were tried


def __getattr__(name: str) -> Any:
    """Import InfiniConfig when it is asked for: its class is one of transformers."""
    if name != "InfiniConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs_transformers(name):
        from .files.config import InfiniConfig
    return InfiniConfig


def is_patched(model: nn.Module) -> bool:
    """Return whether a model was patched by patch_model and not restored by unpatch_model since.

    A wrapper around a patched model (peft, torch.compile, DataParallel) counts as patched, as does a model unwrapped by
    peft's `merge_and_unload`, a copy, and the decoder (`model.model`) alone.

    Args:
        model: Any module.

    Returns:
        True if unpatch_model would undo a patch; patch_model then changes nothing.
    """
    return isinstance(model, nn.Module) and any(STATE in vars(module) for module in model.modules())


def patch_model(
    model: nn.Module,
    *,
    weights: str | None = None,
    only: Sequence[str] | None = None,
    skip: Sequence[str] = (),
    verify: bool = False,
    strict: bool = False,
    calibrate: Tensor | None = None,
) -> PatchReport:
    """Make infini ops compute the layers of a transformers model, in this instance only.

    Norms, projections, rotary embedding, attention and MLP get another forward. Parameters, names, hooks and caches
    stay as they are; only weights that are not aligned to a cache line are copied. Calls that need gradients, autocast
    or attention weights run the original forwards. What a module computes is checked numerically: a small probe module
    of each kind, with random weights, must give equal results by its own forward and by the patched one, for inputs of
    several magnitudes and lengths. Two tokens then go through the whole model before and after, without side effects;
    if the patched model fails or its logits differ, nothing is patched, and the report says why.

    A model sharded by transformers' tensor parallelism (`tp_plan="auto"`) is supported on the CPU: each rank multiplies
    by its shard of the weights, and torch.ops.infini.all_reduce and all_gather combine the results. All ranks must make
    this call, with the same arguments. Docs: docs/distributed.md.

    Args:
        model: A language model of transformers 5, or its decoder or encoder (docs/patching.md);
            on the CPU, in float32, bfloat16 or float16.
        weights: "int8" (a scale for each 16 weights on the CPU, 8.5 bits; elsewhere for each row) or "int4" (indices of
            a table of 16 levels with a scale for each 16 weights on the CPU, 4.5 bits; elsewhere integers with a scale
            and a zero for each group of 64 or 32; the head in int8): the linear layers' weights are quantized and
            freed, one layer after the other. This cannot be undone. None leaves the weights as they are. "group8",
            "table4", "int8_rows", "int4_groups", "w8a16" and "w4a16" each name one format (docs/patching.md).
            "packed" quantizes nothing: weights in bfloat16 on the CPU are laid out for the kernels of single tokens and
            small batches, exactly and in place of the rows, and `unpatch_model` lays them out in rows again; weights in
            other dtypes, or that the embedding shares, stay.
            "auto:BITS", as "auto:4.8", gives each layer int4 or int8 so that the mean is at most BITS bits a weight and
            the expected error of the logits is least: tokens go through the model once for each group of layers
            (budget.py).
        only: Patterns of module names (fnmatch: "model.layers.0*" is that layer and its submodules); others are left.
        skip: Patterns of modules that are left, with all their submodules. Names are those of
            `model.named_modules()`; a pattern that matches none of them is an error.
        verify: Run 64 random tokens through the model before and after, and report how far the logits differ. NaN, or
            a difference that rounding does not explain, is a UserWarning.
        strict: Raise if a module would be left as it is, or if `verify` would warn.
        calibrate: For "auto:BITS", [S] int64 token ids of a representative text, of which the first 512 are used;
            None: 64 random ones.

    Returns:
        What was replaced, and what was left and why; print it for a table. A model that is already patched is not
        changed, and its report says so; neither is one without an embedding of tokens and layers.

    Raises:
        TypeError: If model is not a torch.nn.Module, or calibrate not a tensor.
        ValueError: For unknown weights; for a calibrate that is not [S] token ids, or too few bits; for a pattern that
            matches no module; with strict=True if something would be left; if only a part of the model is patched
            already; under tensor parallelism, if the ranks' reports differ. The model is then as it was before. Also,
            with strict=True, if `verify` finds a fault: quantized weights stay quantized.
        ImportError: Without transformers.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"torch_infini.patch_model: model must be a torch.nn.Module, got {type(model).__name__}")
    check_weights(PATCH, weights, calibrate)
    of_only, of_skip = patterns(PATCH, "only", only), patterns(PATCH, "skip", skip) or ()
    with needs_transformers("patch_model"):
        from .apply import apply
        from .state import Selection, state_of, undo, whole_state
    selection = Selection(of_only, of_skip)
    state = whole_state(model)
    if state is not None:
        assert state.report is not None
        return replace(state.report, already_patched=True)
    if parts := [name for name, module in model.named_modules() if isinstance(module, Patched)]:
        part = next(filter(None, parts), type(model).__name__)
        raise ValueError(
            f"torch_infini.patch_model: model must not contain patched modules, got {part}: "
            "first call unpatch_model with this model."
        )
    decoder = find_decoder(model)
    if decoder is not None:
        must_match(model, "only", selection.only or ())
        must_match(model, "skip", selection.skip)
    found = decoder if verify else None
    if found is None:
        return apply(model, weights, strict, selection, calibrate)
    from .checks.verification import Measurement

    measurement = Measurement(model, found[1])
    report = apply(model, weights, strict, selection, calibrate)
    if report.reason:
        return report
    state = state_of(model)
    try:
        verification = measurement.compare(bool(state.quantized))
        report = replace(report, verification=verification)
        if fault := verification.fault:
            if strict:
                kept = ": it stays patched, because its weights are quantized" if state.quantized else ""
                raise ValueError(f"torch_infini.patch_model: strict=True, but {fault}{kept}")
            warnings.warn(f"torch_infini.patch_model: {fault}", UserWarning, stacklevel=2)
    except BaseException:
        if state.quantized:
            state.report = report
        else:
            undo(model)
        raise
    state.report = report
    return report


@contextmanager
def needs_transformers(function: str) -> Iterator[None]:
    """Turn a failed import of transformers in the body into an ImportError that says what to install.

    A release that lacks nothing of what is imported is tried: whether the arguments of its modules are known ones is
    asked of each (layers/attention.py).
    """
    try:
        yield
    except ImportError as error:
        # Another release may lack a module of it, or a name.
        if (error.name or "").partition(".")[0] != "transformers":
            raise
        found = getattr(sys.modules.get("transformers"), "__version__", "")
        raise ImportError(
            f"torch_infini.{function} needs transformers{' >= 5' if found else ''}{found and f', got {found}'}: "
            f"run `pip install '{TRANSFORMERS}'`."
        ) from error


def similarity(name: str, pattern: str) -> float:
    """Rate from 0 to 1 how close a pattern is to a name or its last parts: "lm_haed" to "base_model.model.lm_head"."""
    end = ".".join(name.split(".")[-pattern.count(".") - 1 :])
    return max(SequenceMatcher(None, pattern, part).ratio() for part in (name, end))


def must_match(model: nn.Module, argument: str, patterns: Sequence[str]) -> None:
    """Raise ValueError for a pattern that matches no module name: most likely a misspelt name."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        nearest = sorted(set(names), key=lambda name: (-similarity(name, pattern), name))[:3]
        raise ValueError(
            f"torch_infini.patch_model: every pattern of {argument} must match the name of a module of the model "
            f"(fnmatch, as in model.named_modules()), got {pattern!r}; the nearest names are {', '.join(nearest)}"
        )


def unpatch_model(model: nn.Module) -> None:
    """Undo patch_model: restore the class of every module and the config of the model.

    Args:
        model: The model that patch_model was called with, a copy of it, a wrapper around it, or a model taken out of a
            wrapper (`is_patched` tells whether it is patched). Modules outside it stay as they are: for `model.model`,
            the head.

    Raises:
        ValueError: If it is not patched, or if its weights were quantized.
    """
    if not is_patched(model):
        raise ValueError(
            f"torch_infini.unpatch_model: model must be patched, got a {type(model).__name__} that is not."
        )
    from .state import states_in, undo

    if quantized := [name for state in states_in(model) for name in state.quantized]:
        raise ValueError(
            f"torch_infini.unpatch_model: the model must have its original weights, got {len(quantized)} layers "
            "with quantized weights: load the original model again."
        )
    undo(model)


@contextmanager
def patched(model: nn.Module, **options: Any) -> Iterator[PatchReport]:
    """Patch a model for the body of a with statement, and unpatch it afterwards.

    Args:
        model: As for patch_model.
        options: Options of patch_model; of `weights` only "packed", because others cannot be undone.

    Yields:
        The report.

    Raises:
        ValueError: For other `weights`, or a model that is patched already; and as patch_model.
    """
    if options.get("weights") not in (None, PACKED):
        raise ValueError(
            "torch_infini.patched: weights must be None, because quantized weights cannot be restored, or 'packed', "
            f"got {options['weights']!r}"
        )
    if is_patched(model):
        raise ValueError("torch_infini.patched: model must not be patched already")
    report = patch_model(model, **options)
    try:
        yield report
    finally:
        if is_patched(model):
            unpatch_model(model)


def save_patched(model: nn.Module, folder: str | Path, tokenizer: Any = None) -> None:
    """Save a patched model to a folder, with quantized weights as they are.

    `load_patched` and `AutoModelForCausalLM.from_pretrained` read the folder, and so does `torch_infini.LLM` if it
    supports the model. Without quantized weights, transformers alone can read it as well; with them, from_pretrained
    needs `import torch_infini` first and fails otherwise.

    The folder contains what save_pretrained writes, torch_infini.json (which layers are quantized, and how) and
    torch_infini.safetensors (buffers that save_pretrained leaves out).

    Args:
        model: A patched model of a class of transformers.
        folder: Created if missing; existing files of these names are replaced.
        tokenizer: Saved as well. None: copy the tokenizer files of the folder that the model was loaded from, if it is
            on this machine.

    Raises:
        ValueError: If the model is not patched, its class is not from transformers, or it is sharded.
    """
    if not is_patched(model):
        raise ValueError(
            f"torch_infini.save_patched: model must be patched, got a {type(model).__name__} that is not: "
            "use its own save_pretrained."
        )
    from .files.save import save, save_tokenizer

    save(model, Path(folder))
    save_tokenizer(model, Path(folder), tokenizer)


def load_patched(folder: str | Path) -> nn.Module:
    """Load a model that save_patched wrote; it is patched, and in evaluation mode.

    Quantized weights stay quantized: the full-precision weight of such a layer never exists in memory.

    Args:
        folder: A folder that save_patched wrote.

    Returns:
        The model.

    Raises:
        FileNotFoundError: If save_patched did not write the folder, or a file is missing.
        ValueError: If a file is not what save_patched writes, or the files do not match each other; the message names
            the file and the field or the tensors. This is checked before anything is allocated.
    """
    with needs_transformers("load_patched"):
        from .files.load import load

    return load(Path(folder))


def load_model(
    name: str | Path, dtype: torch.dtype | str | None = None, activations: Literal["int8"] | None = None
) -> nn.Module:
    """Load a model of transformers from a checkpoint of any kind, patched, in evaluation mode.

    Quantized layers keep their integers where int8 and int4 hold them without loss; others are dequantized, and rounded
    once to `dtype`. The formats: docs/checkpoints.md. torch_infini.LLM serves the same checkpoints.

    Args:
        name: A folder, a .gguf file, or "owner/model" of the hub (from its cache where there is no network). A folder
            of save_patched is loaded as by load_patched.
        dtype: Of activations and dense weights, or its name; None and "auto": the checkpoint's.
        activations: "int8": the inputs of quantized layers are quantized too, each row with a scale, on CPUs that
            multiply integers: faster, above all for prompts, but with other tokens. None: only where the checkpoint
            says so.

    Returns:
        The model.

    Raises:
        FileNotFoundError: For a path that does not exist, or a name that is neither in the hub nor in its cache.
        ValueError: For a checkpoint that contradicts itself or its model, or a model that cannot be patched.
        NotImplementedError: For a variant of a format that is not supported.
    """
    from .._core.dtypes import floating

    with needs_transformers("load"):
        from .files.foreign import load

    return load(name, floating(dtype), activations=activations)


def describe(model: nn.Module | str | Path) -> Description:
    """Find how a causal language model of transformers computes; print the result.

    As in patch_model, small copies of its modules, with random weights, are tried under every rule that has kernels;
    one call that records the masks shows which keys each layer sees. Names and classes are not used. Of a folder or
    file only the config is read and no weight is allocated, so that a model of any size takes under a second.

    Args:
        model: A model, patched or not (it is patched meanwhile), a folder, a .gguf file, or "owner/model" of the hub.

    Returns:
        Heads, scales, windows, soft caps, sinks, rotation, norms and their rounding, MLPs by layer; what patch_model
        leaves, and why.

    Raises:
        TypeError: If model is neither a module nor a path.
        ValueError: If it has no decoder of the Llama family, or the config is of no causal model of transformers.
        FileNotFoundError: If there is no such folder or file.
        ImportError: Without transformers.
    """
    if not isinstance(model, nn.Module | str | Path):
        raise TypeError(f"torch_infini.describe: model must be a torch.nn.Module or a path, got {type(model).__name__}")
    with needs_transformers("describe"):
        from .description import describe
    return describe(model)
