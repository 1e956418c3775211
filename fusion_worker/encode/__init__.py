"""Encodes many chunks without a server: in processes on one machine, or on a Ray cluster."""
