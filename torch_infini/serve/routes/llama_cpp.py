"""GET /props and /slots, in the form of llama.cpp's server: what monitors and load balancers read of it."""

from __future__ import annotations

from typing import Any

import torch
from fastapi import APIRouter, Request
from starlette.responses import Response

from ... import __version__
from ..._core.cpu import cpu_name
from ..._core.library import cpu_capability
from ...engine import SamplingParams
from ..encoding import json_response
from ..errors import ApiError
from ..reading import template_of
from ..service import Service

router = APIRouter()


@router.get("/props", response_model=None)
async def props(request: Request) -> Response:
    """Answer the settings of requests that give none, and what is served."""
    service: Service = request.app.state.service
    tokenizer = service.llm.engine.tokenizer
    params = SamplingParams(**{"max_tokens": None, **service.sampling})
    settings = {
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,  # -1: as many as the context leaves
        "seed": -1 if params.seed is None else params.seed,  # -1: a random one
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stop),
    }
    name = service.settings.model_names[0]
    return json_response(
        {
            "default_generation_settings": {"n_ctx": service.max_model_len, "params": settings},
            "total_slots": service.llm.engine.config.max_num_seqs,
            "model_alias": name,
            "model_path": name,  # answers have no paths
            "chat_template": template_of(tokenizer, False),
            "bos_token": getattr(tokenizer, "bos_token", None) or "",
            "eos_token": getattr(tokenizer, "eos_token", None) or "",
            "modalities": {"vision": not service.llm.engine.prompts.images.reason, "audio": False},
            "build_info": f"torch_infini {__version__}",
            "device": described(service.llm.engine.model.device),
        }
    )


def described(device: torch.device) -> dict[str, Any]:
    """Return what computes the answers; llama.cpp's server does not tell."""
    if device.type == "cuda":
        return {"type": "cuda", "name": torch.cuda.get_device_name(device)}
    cpu = {"name": cpu_name(), "cpu_capability": cpu_capability(), "threads": torch.get_num_threads()}
    return {"type": device.type, **cpu}


@router.get("/slots", response_model=None)
async def slots(request: Request) -> Response:
    """Answer one slot for each sample that a step may have; with fail_on_no_slot, 503 if all are taken.

    Samples have no slot of their own here: the first slots are the busy ones.
    """
    service: Service = request.app.state.service
    total = service.llm.engine.config.max_num_seqs
    busy = min(service.in_flight, total)
    if busy == total and request.query_params.get("fail_on_no_slot", "0") not in ("", "0", "false"):
        raise ApiError(503, f"a slot must be free, got {busy} busy ones of {total}", code="no_slot")
    speculates = service.llm.engine.config.speculative_config is not None
    state = {"n_ctx": service.max_model_len, "speculative": speculates}
    return json_response([{"id": i, **state, "is_processing": i < busy} for i in range(total)])
