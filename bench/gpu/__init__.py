"""Benchmarks of a GPU: all measurements in one run."""
