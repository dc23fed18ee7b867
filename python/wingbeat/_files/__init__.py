"""Datasets in files, as both `wingbeat.train` and `wingbeat.ml` read them: where they are, what is in them, and their rows."""
