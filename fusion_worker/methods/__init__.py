"""What the papers say: recipes, and the slots they are made of."""
