"""Selectors: which tokens of a context to recompute, all with the interface of base.py."""
