"""Runs trials at the same time, and shows how far they are: what `wingbeat.tune` and `CrossValidator` stand on."""
