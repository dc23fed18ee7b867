"""Imports what is not there."""

import no_such_module_anywhere
