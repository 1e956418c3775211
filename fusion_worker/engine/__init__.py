"""How a batch moves: pool, loader, scheduler, engine, and the life of a request."""
