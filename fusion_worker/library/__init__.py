"""Finds models: known names from a package registry, Hugging Face hub ids and GGUF files, as model directories."""
