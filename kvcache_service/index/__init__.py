"""The in-memory index: from a prompt's path to entries, with their records and heat."""
