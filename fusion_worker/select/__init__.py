"""Selectors: which tokens of a context to recompute. One file for each, all with the interface of base.py."""
