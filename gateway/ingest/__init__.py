"""Ingestion of documents: parsing, splitting, embedding, storing, and encoding ahead of time."""
