"""Computes: the paged KV pool, what a request's rows see, batches of them, one step after another."""
