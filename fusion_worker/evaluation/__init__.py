"""`fusionkv eval`: recipes, ratios and tasks in one table, on the engine itself; imports of the package load no torch."""
