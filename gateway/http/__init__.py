"""The gateway's HTTP servers: an OpenAI-compatible endpoint, and pages for operators."""
