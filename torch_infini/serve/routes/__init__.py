"""The routes of the server, one file per group; ROUTERS lists them."""

from . import chat, completions, models, status, tokens

ROUTERS = (chat.router, completions.router, models.router, status.router, tokens.router)

__all__ = ["ROUTERS"]
