"""Benchmarks of the cache service: speed, cost of the index, and storage saved."""
