"""The error type that the examples report without a traceback."""


class UserError(Exception):
    """An error that the user can correct; its message is one line."""
