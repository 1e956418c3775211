"""From logits to an answer: sampling, text, eviction, and a ratio that rises when a token is in doubt."""
