"""The routes of the server, a file for each kind; a new one goes into ROUTERS."""

from . import chat, completions, models, status, tokens

ROUTERS = (chat.router, completions.router, models.router, status.router, tokens.router)

__all__ = ["ROUTERS"]
