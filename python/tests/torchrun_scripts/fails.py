"""Raises at once, from another exception."""


def load(path):
    raise FileNotFoundError(2, "No such file", path)


try:
    load("données.csv")
except OSError as error:
    raise RuntimeError("cannot begin") from error
