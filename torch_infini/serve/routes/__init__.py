"""The routes of the server, one file per group; ROUTERS lists them."""

from . import chat, completions, messages, models, ollama, responses, status, tokens

ROUTERS = tuple(group.router for group in (chat, completions, messages, models, ollama, responses, status, tokens))

__all__ = ["ROUTERS"]
