"""Corrects reused KV by what a corpus has taught."""
