"""Attention over a paged KV pool by position: what the engine computes, one operation a file."""
