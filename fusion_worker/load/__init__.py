"""Brings a prompt's chunks into the pool: looked up, fetched, encoded here, and written back."""
