"""find_switch: finds the length up to which a model of transformers rotates by its short factors (longrope), and what
its generation does beyond; RotationByRow: both rotations in one batch, a token's own for each.

transformers' rotary embeddings choose one for all tokens of a call, by the largest position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ...nn import RotarySwitch
from ..layers.attention import PositionEmbeddings, halves_of
from ..layers.paged import CURRENT
from ..own_forward import CACHE_NAMES, PAST, arguments_of, cache_name
from .sites import Unserved

LENGTH_NAMES = {f"{name}_length" for name in CACHE_NAMES}  # arguments of embeddings of positions


def find_switch(inner: Any, positions: int) -> RotarySwitch | None:
    """Return the RotarySwitch of a causal language model of transformers; None if it has one rotation.

    Args:
        inner: The model.
        positions: The longest sequence that its config names.

    Raises:
        Unserved: If parts of it would switch at different lengths.
    """
    text = inner.config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    lengths = {
        int(one.get(_ORIGINAL) or getattr(text, _ORIGINAL, None) or positions)
        for one in (rope, *(value for value in rope.values() if isinstance(value, dict)))
        if one.get("rope_type") == "longrope"
    }
    if len(lengths) > 1:
        raise Unserved(f"its layers change the rotation at different lengths: {sorted(lengths)}")
    if not lengths or min(lengths) >= positions:
        return None
    (length,) = lengths
    if not rotary_modules(inner):
        raise Unserved(f"no module of it rotates otherwise beyond {length} tokens, as its config (longrope) says")
    return RotarySwitch(length, positions, computes_anew(inner, length))


_ORIGINAL = "original_max_position_embeddings"


def computes_anew(inner: Any, length: int) -> bool:
    """Return whether a model's generation drops the keys of `length` tokens when one more is to be computed.

    Raises:
        Unserved: If it cannot be asked.
    """
    past = DynamicCache()
    past.update(torch.zeros(1, 1, length, 1), torch.zeros(1, 1, length, 1), 0)
    ids = torch.zeros(1, length + 1, dtype=torch.int64, device=inner.device)
    name = cache_name(inner.prepare_inputs_for_generation) or PAST
    try:
        made = inner.prepare_inputs_for_generation(ids, **{name: past}, use_cache=True)
    except Exception as error:  # a model's own may need anything
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise Unserved(f"what its generation does beyond {length} tokens is unknown: {cause}") from error
    return made.get(name) is None


def rotary_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that compute cos and sin by longrope's factors."""
    types = ((module, getattr(module, "rope_type", None)) for module in model.modules())
    return [m for m, kind in types if "longrope" in (kind.values() if isinstance(kind, dict) else (kind,))]


class RotationByRow:
    """The rotations of one batch.

    Args:
        switch: The model's.
        rows: [tokens], the batch's positions, as its RotarySwitch has them.

    Attributes:
        positions: [tokens], the positions themselves.
    """

    def __init__(self, switch: RotarySwitch, rows: Tensor) -> None:
        self.positions = switch.position(rows)
        self._length, self._is_long = switch.length, switch.is_long(rows)

    def rotate(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], whole: Any) -> Any:
        """Return what a rotary module's call returned, with each token's own rotation."""
        by_name = "position_ids" in kwargs
        positions = kwargs["position_ids"] if by_name else args[1]

        def call(changed: Tensor) -> Any:
            if by_name:
                return module.forward(*args, **{**kwargs, "position_ids": changed})
            return module.forward(args[0], changed, *args[2:], **kwargs)

        # Short factors for positions that are all short; long ones because of one more that is not.
        short = call(positions.clamp(max=self._length - 1))
        long = call(torch.cat((positions, positions.new_full((len(positions), 1), self._length)), 1))
        is_long = self._is_long[None, :, None]
        chosen = tuple(torch.where(is_long, b[:, :-1], a) for a, b in zip(short, long, strict=True))
        if not isinstance(whole, PositionEmbeddings):
            return chosen
        embeddings = PositionEmbeddings(chosen)
        embeddings.half = halves_of(chosen)
        return embeddings


def rotate_by_row(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of a rotary module: without a batch of the engine on this thread it changes nothing."""
    rotation: RotationByRow | None = getattr(CURRENT.backend, "rotation", None)
    return output if rotation is None else rotation.rotate(module, args, kwargs, output)


def position_modules(model: nn.Module) -> list[nn.Module]:
    """Return the embeddings of positions that count from a cache's length unless they are told positions, as BART's."""
    embeddings = ((module, module.forward) for module in model.modules() if isinstance(module, nn.Embedding))
    named = ((module, set(arguments_of(forward))) for module, forward in embeddings)
    return [module for module, names in named if "position_ids" in names and names & LENGTH_NAMES]


def place_by_row(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of such a module: tells it the positions of a batch of the engine on this thread."""
    positions = getattr(CURRENT.backend, "positions", None)
    if not isinstance(positions, Tensor) or len(args) > 2:
        return None
    return args, {**kwargs, "position_ids": positions}
