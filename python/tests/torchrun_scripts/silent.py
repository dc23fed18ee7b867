"""Prints nothing."""
