"""Attention over a paged KV pool, indexed by position: one operation per file, for CPU and GPU."""
