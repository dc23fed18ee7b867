"""Exceptions that have travelled."""


def remake(kind, args, state):
    """An exception of this class, without a call of its `__init__`."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error
