"""Speed of a worker: time to first token, requests a second."""
