"""POST /score and /rerank of cross-encoders, and /classify, in the forms of vLLM's server; also below /v1, and
/v2/rerank."""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...engine.encoder import Encoder
from ..embeddings import embed
from ..encoding import json_response
from ..scores import ClassifyBody, RerankBody, ScoreBody, score
from ..service import Service
from ..streaming import CLIENT_CLOSED_REQUEST, run_until_disconnect

router = APIRouter()


@router.post("/score", response_model=None)
@router.post("/v1/score", response_model=None)
async def scores(body: ScoreBody, request: Request) -> Response:
    """Answer how well second texts answer first ones."""
    service: Service = request.app.state.service
    name = service.served(body.model).name
    params = body.params(service)
    pairs, param = body.pairs()
    found = await run_until_disconnect(request.receive, score(service, pairs, params, param))
    if found is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    data = [{"index": i, "object": "score", "score": one.item()} for i, one in enumerate(found.vectors)]
    usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
    head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": name}
    return json_response({**head, "data": data, "usage": usage})


@router.post("/classify", response_model=None)
@router.post("/v1/classify", response_model=None)
async def classify(body: ClassifyBody, request: Request) -> Response:
    """Answer the probabilities of a classifier's labels for each text, and the name of the likeliest."""
    service: Service = request.app.state.service
    name, adapter = service.served(body.model)
    params = body.params(service)
    found = await run_until_disconnect(request.receive, embed(service, body.input, params, adapter))
    if found is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    model = service.llm.engine.model
    assert isinstance(model, Encoder)  # params() refuses others
    data = []
    for i, scores in enumerate(found.vectors):
        label = model.label_names[int(scores.argmax())]
        data.append({"index": i, "label": label, "probs": scores.tolist(), "num_classes": len(scores)})
    usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
    head = {"id": f"classify-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": name}
    return json_response({**head, "data": data, "usage": usage})


@router.post("/rerank", response_model=None)
@router.post("/v1/rerank", response_model=None)
@router.post("/v2/rerank", response_model=None)
async def rerank(body: RerankBody, request: Request) -> Response:
    """Answer documents in the order of their scores for a query."""
    service: Service = request.app.state.service
    name = service.served(body.model).name
    params, count = body.params(service), body.count
    pairs = [(body.query, document) for document in body.documents]
    found = await run_until_disconnect(request.receive, score(service, pairs, params, "documents"))
    if found is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    scores = [one.item() for one in found.vectors]
    results = []
    for i in sorted(range(len(scores)), key=lambda i: -scores[i])[:count]:
        document = {} if body.return_documents is False else {"document": {"text": body.documents[i]}}
        results.append({"index": i, **document, "relevance_score": scores[i]})
    usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
    return json_response({"id": f"rerank-{uuid.uuid4().hex}", "model": name, "usage": usage, "results": results})
