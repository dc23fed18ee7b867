"""Distributed PyTorch on Wingbeat.

Importing this package imports nothing else: a rank must not pay for what its script does not use.
"""

__version__ = "0.1.0"
