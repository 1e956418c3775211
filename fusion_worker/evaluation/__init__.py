"""`fusionkv eval`: recipes, ratios and tasks in one table, measured on the engine itself."""
