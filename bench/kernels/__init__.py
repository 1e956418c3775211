"""Benchmarks of the kernels: speed and errors beside other kernels."""
