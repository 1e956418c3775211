"""A small second model that says which tokens matter (CacheClip)."""
