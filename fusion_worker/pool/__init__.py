"""The paged KV pool: slots, the chunks in them, and who holds which."""
