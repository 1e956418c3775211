"""The store: writes, reads, promotes and evicts entries."""
