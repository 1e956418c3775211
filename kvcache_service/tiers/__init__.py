"""The tiers that hold entries' bytes, behind one contract (base.py)."""
