"""The pool of fusion workers behind a gateway, and the choice of a worker for each request."""
