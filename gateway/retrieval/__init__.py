"""Retrieval engines behind one contract: embedded, or Milvus."""
