"""Services under load, hostile input, and for hours."""
