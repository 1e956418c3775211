"""Computation: the paged KV pool, plans of prefills, scheduling, batches and forward passes."""
