"""The cache service: keeps every chunk's KV cache once and finds it whatever came before the chunk."""
