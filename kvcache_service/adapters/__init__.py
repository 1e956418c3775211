"""Adapters by which other engines keep their KV in the cache service; each is loaded by its engine alone."""
