"""CommandError: bad input to a command; its message is one sentence that says how to correct it."""


class CommandError(Exception):
    """Printed without a traceback; the exit status is 2."""
