"""create_app: the ASGI application: routes, middleware and error handlers around a Service."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from .. import __version__
from .errors import add_handlers
from .middleware import PUBLIC, Authentication, BodyLimit, PlainJson, RequestId
from .request_log import RequestLog
from .routes import ROUTERS, page
from .service import Service

THIS_MACHINE = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"  # origins of its web pages


def create_app(service: Service) -> FastAPI:
    """Make the application of a service.

    Args:
        service: The caller closes it and its engine.

    Returns:
        An ASGI application for uvicorn, or for another server or test client; app.state.service is the service.
    """
    # FastAPI's documentation pages load scripts from the internet; /openapi.json has the same content.
    app = FastAPI(title="torch_infini", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    add_handlers(app)
    for router in ROUTERS:
        app.include_router(router)
    # The middleware added last runs first.
    app.add_middleware(PlainJson, prefix="/api/")  # Ollama's
    app.add_middleware(BodyLimit, max_body=service.max_body, seconds=service.settings.receive_timeout)
    if service.settings.api_key is not None:
        public = PUBLIC | page.files().keys() if service.settings.page else PUBLIC
        app.add_middleware(Authentication, api_key=service.settings.api_key, public=public)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(service.settings.allow_origins),
        allow_origin_regex=THIS_MACHINE,
        allow_methods=["*"],
        allow_headers=["*"],
    )
    if service.settings.log_requests:
        app.add_middleware(RequestLog)
    app.add_middleware(RequestId)
    return app
