"""Scores by which tokens of a context are chosen to be recomputed: the functions of the selectors of recipes."""
