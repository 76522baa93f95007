"""The routes of the server, one file per group; ROUTERS lists them."""

from . import chat, completions, messages, models, status, tokens

ROUTERS = (chat.router, completions.router, messages.router, models.router, status.router, tokens.router)

__all__ = ["ROUTERS"]
