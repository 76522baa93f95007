"""patch_model: infini ops in the place of a transformers model's layers, in one model instance, until unpatch_model.

Importing this costs nothing; transformers is imported by the first call of patch_model.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from .report import PatchReport, Row
from .swap import Patched

__all__ = ["PatchReport", "Row", "is_patched", "patch_model", "unpatch_model"]


def is_patched(model: nn.Module) -> bool:
    """Whether patch_model was called with this model, and unpatch_model not since."""
    return "_infini_patch" in vars(model)


def patch_model(model: nn.Module, *, strict: bool = False) -> PatchReport:
    """Let infini ops compute the layers of a transformers model, in this instance only.

    Norms, projections, rotary embedding, attention and MLP get another forward; weights, names, hooks and caches stay
    as they are, and nothing is copied. Calls that need gradients, autocast or attention weights run the original
    forwards. One module of each kind is run on a few random tokens, to see that its numbers are the original's.

    Args:
        model: LlamaForCausalLM or LlamaModel of transformers 5, or a model with the same modules and attributes, on the
            CPU, in float32, bfloat16 or float16.
        strict: Raise where a module would be left as it is.

    Returns:
        What was replaced, and what was left for which reason; print it for a table. A model that is patched already is
        not touched, and its report says so.

    Raises:
        TypeError: For a model of another family.
        ValueError: With strict=True where something would be left, or if a part of the model is patched already. The
            model is then as it was before.
        ImportError: Without transformers.
    """
    try:
        from . import apply
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(
            "torch_infini.patch_model needs transformers: run `pip install 'transformers>=5,<6'`."
        ) from error
    if isinstance(model, nn.Module):
        if is_patched(model):
            return replace(vars(model)[apply.STATE].report, already_patched=True)
        part = next((name for name, module in model.named_modules() if isinstance(module, Patched)), None)
        if part is not None:
            raise ValueError(
                f"torch_infini.patch_model: model must not contain patched modules, got {part}: "
                "first call unpatch_model with the model that patch_model was called with."
            )
    return apply.apply(model, strict)


def unpatch_model(model: nn.Module) -> None:
    """Take patch_model back: every module has its own class again, and the model its own config.

    Args:
        model: What patch_model was called with, or a copy of it.

    Raises:
        ValueError: If it is not patched.
    """
    if not (isinstance(model, nn.Module) and is_patched(model)):
        raise ValueError(
            f"torch_infini.unpatch_model: model must be patched, got a {type(model).__name__} that is not."
        )
    from . import apply

    apply.undo(model)
