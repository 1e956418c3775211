"""Benchmarks and evaluation: speed and quality, measured against baselines of the same run."""

import fusionkv.fusion_worker  # noqa: F401  Before torch: sets how OpenMP threads wait.
