"""Computation: plans of prefills, scheduling, batches and forward passes."""
