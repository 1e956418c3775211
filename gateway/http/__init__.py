"""The gateway's HTTP server: an OpenAI-compatible endpoint."""
