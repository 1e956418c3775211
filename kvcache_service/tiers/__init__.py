"""The storage tiers that hold entries' bytes, behind one interface (base.py)."""
