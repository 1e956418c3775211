"""Benchmarks of running services: load, hostile input, soak tests, start-up, telemetry, and vLLM."""
