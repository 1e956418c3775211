"""KV bytes in and out of the pool: storage formats, shared memory, GPUDirect Storage, handover, signatures."""
