"""The auxiliary model: a small model that scores the tokens of a context (CacheClip)."""
