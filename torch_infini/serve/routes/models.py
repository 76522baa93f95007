"""GET /v1/models and /v1/models/NAME."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..encoding import json_response
from ..service import Service

router = APIRouter()
STARTED = int(time.time())


def described(service: Service, name: str) -> dict[str, Any]:
    adapter = {"parent": service.settings.model_names[0]} if name in service.adapters else {}
    return {
        "id": name,
        "object": "model",
        "created": STARTED,
        "owned_by": "torch_infini",
        "max_model_len": service.max_model_len,  # as in vLLM, and `parent`
        **adapter,
    }


@router.get("/v1/models", response_model=None)
async def models(request: Request) -> Response:
    """List the names under which the model is served, and its adapters."""
    service: Service = request.app.state.service
    data = [described(service, name) for name in (*service.settings.model_names, *service.adapters)]
    return json_response({"object": "list", "data": data})


@router.get("/v1/models/{name:path}", response_model=None)
async def model(name: str, request: Request) -> Response:
    """Describe the model with this name."""
    service: Service = request.app.state.service
    service.served(name)
    return json_response(described(service, name))
