"""Recipes: the published methods as combinations of encoding, selector and further options, and their modifiers."""
