"""Runs with -m: a package, which imports from itself."""

import sys

from tell import tell

from . import beside

tell(argv=sys.argv, file=__file__, package=__package__, spec=__spec__.name, beside=beside.NAME)
