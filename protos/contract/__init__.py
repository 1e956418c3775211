"""What a request may ask for: one set of checks, for the gateway and the worker."""
