"""Retrieval engines behind one interface: embedded (LanceDB) or Milvus."""
