"""Benchmarks of running services: a soak test, and vLLM."""
