"""The one kind of error that this package raises on purpose."""


class InputError(SystemExit, ValueError):
    """Something the user gave cannot be used: one line that names it and says what to do.

    To a caller in Python it is a `ValueError`. On a command line, where nobody catches it, it is a
    `SystemExit`: Python prints the line, without a traceback, and exits with status 1.
    """
