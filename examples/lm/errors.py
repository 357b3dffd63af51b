"""The one kind of error that the example shows without a traceback."""


class UserError(Exception):
    """Something that the person at the keyboard can put right; its text is one line."""
