"""Benchmarks of the kernels on CPUs and GPUs: speed and errors."""
