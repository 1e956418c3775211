"""Selectors: which tokens of a context to recompute. All have the interface of base.py."""
