"""Which tokens of a context are worth recomputing: one file for each selector, all behind the contract in base.py."""
