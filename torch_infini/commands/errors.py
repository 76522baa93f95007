"""CommandError: bad input to a command; its message is one sentence that says how to correct it."""


class CommandError(Exception):
    """Invalid input to a command; printed without a traceback, with exit status 2."""
