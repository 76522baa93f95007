"""An HTTP server with OpenAI's API, on AsyncLLM.

create_app makes the application, run_server serves it. To read the code: settings.py, app.py, routes/, schemas.py,
service.py, generation.py, metrics.py, request_log.py, reading.py, parsers/, answers.py, streaming.py, embeddings.py,
scores.py, lifecycle.py.
"""

try:
    import fastapi as _fastapi
    import prometheus_client as _prometheus_client
    import uvicorn as _uvicorn
except ImportError as error:
    raise ImportError(
        "torch_infini.serve: fastapi, prometheus-client and uvicorn must be installed (pip install "
        f"'torch_infini[serve]'), got {error}",
        name=error.name,
    ) from None

from .app import create_app
from .lifecycle import Server, address_of, bind, bind_all, run_server
from .service import Service
from .settings import ServeSettings

__all__ = ["ServeSettings", "Server", "Service", "address_of", "bind", "bind_all", "create_app", "run_server"]
del _fastapi, _prometheus_client, _uvicorn
