"""From a prompt's path to the entries that serve it, and what is known of each entry."""
