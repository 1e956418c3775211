"""Decoding: sampling, detokenisation, eviction of context, and a ratio that rises when a token is uncertain."""
