"""Attention kernels for CPUs."""
