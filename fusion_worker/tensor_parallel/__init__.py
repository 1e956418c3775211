"""Tensor parallelism: one model split by heads over several processes."""
