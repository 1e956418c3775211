"""Benchmarks of a worker: time to first token, throughput, decoding and encoding."""
