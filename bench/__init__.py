"""Benchmarks and evaluation: speed and quality, measured against baselines of the same run."""
