"""Runs with -m: a module's name and its arguments."""

import sys

from tell import tell

tell(argv=sys.argv, file=__file__, name=__name__, package=__package__, spec=__spec__.name, folder=sys.path[0])
