"""KV bytes in and out of the pool: storage formats, GPUDirect Storage, handover, signatures."""
