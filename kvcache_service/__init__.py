"""The cache service: stores each chunk's KV cache once, and finds it behind any prefix."""
