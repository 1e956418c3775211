"""Watches what recipes do to answers, explains them, and falls back to full attention."""
