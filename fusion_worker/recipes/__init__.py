"""Recipes: every system of the papers as a value of its slots, and what modifiers change about one."""
