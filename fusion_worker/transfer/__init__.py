"""Moves KV bytes between host and device: shared memory, GPUDirect, storage formats, signatures."""
