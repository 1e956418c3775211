"""Documents in: parsed, split, embedded, stored, and encoded ahead of time."""
