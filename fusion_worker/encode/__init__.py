"""Encoding many chunks without a server: on processes of one machine, or on Ray."""
