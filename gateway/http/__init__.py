"""HTTP beside gRPC: an OpenAI-compatible endpoint, and pages for operators."""
