"""Decoding: sampling, detokenisation and eviction of context."""
