"""Speed of the cache service, what an index costs, and the storage that it saves."""
