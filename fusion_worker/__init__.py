"""The fusion worker: holds one model, turns chunk references into an answer. Imports of the package load no torch."""
