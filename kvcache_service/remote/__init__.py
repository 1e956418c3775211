"""The remote tier, an external distributed store shared by cache services."""
