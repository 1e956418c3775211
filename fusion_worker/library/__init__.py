"""Models by name: known ones from a package registry, Hugging Face hub ids and GGUF files, as directories."""
