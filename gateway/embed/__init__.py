"""Models that retrieval asks: embedders and rerankers, each in a process of its own or behind a URL."""
