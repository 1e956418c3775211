"""Embedders and rerankers for retrieval, each in a separate process or behind a URL."""
