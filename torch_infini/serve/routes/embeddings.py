"""POST /v1/embeddings, and /pooling in the form of vLLM's server."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..embeddings import Embedded, EmbeddingsBody, PoolingBody, embed
from ..encoding import json_response
from ..service import Service
from ..streaming import CLIENT_CLOSED_REQUEST, run_until_disconnect

router = APIRouter()


@router.post("/v1/embeddings", response_model=None)
async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
    """Answer the embeddings of texts or token ids."""
    return await answered(request, body, "embedding", "embedding", {})


@router.post("/pooling", response_model=None)
async def pooling(body: PoolingBody, request: Request) -> Response:
    """Answer pooled hidden states, as the body says."""
    head = {"id": f"pool-{uuid.uuid4().hex}", "created": int(time.time())}
    return await answered(request, body, "pooling", "data", head)


async def answered(request: Request, body: EmbeddingsBody, kind: str, field: str, head: dict[str, Any]) -> Response:
    service: Service = request.app.state.service
    name, adapter = service.served(body.model)
    params = body.params(service)
    found: Embedded | None = await run_until_disconnect(request.receive, embed(service, body.input, params, adapter))
    if found is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    vectors = enumerate(found.vectors)
    data = [{"object": kind, "index": i, field: body.shown(vector)} for i, vector in vectors]
    usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
    return json_response({**head, "object": "list", "data": data, "model": name, "usage": usage})
