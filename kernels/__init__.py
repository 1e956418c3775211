"""Attention over a paged KV pool, indexed by position, and other operations on KV: each for CPU and GPU."""
