"""GET /health, /version, /load and /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from ... import __version__
from ..encoding import json_response
from ..service import Service

router = APIRouter()


@router.head("/health", response_model=None, include_in_schema=False)
@router.get("/health", response_model=None)
async def health(request: Request) -> Response:
    """Answer 200 while requests are served, and 503 while draining or after the engine has failed."""
    service: Service = request.app.state.service
    service.check_health()
    return json_response({"status": "ok"})


@router.get("/version", response_model=None)
async def version() -> Response:
    """Answer torch_infini's version."""
    return json_response({"version": __version__})


@router.get("/load", response_model=None)
async def load(request: Request) -> Response:
    """Answer the number of samples that are running or waiting."""
    service: Service = request.app.state.service
    return json_response({"server_load": service.in_flight})


@router.get("/metrics", response_model=None)
async def metrics(request: Request) -> Response:
    """Answer counts and times in Prometheus' text format."""
    service: Service = request.app.state.service
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)
