"""Loads a prompt's chunks into the pool: looks them up, fetches or encodes them, and writes new ones back."""
