"""CommandError: bad input to a command; its text is one sentence that says how to mend it."""


class CommandError(Exception):
    """Printed without a traceback; the exit status is 2."""
