"""Is no Python."""

print("never"
