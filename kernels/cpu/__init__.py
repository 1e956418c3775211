"""The same operations on a CPU."""
