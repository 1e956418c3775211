"""Answer quality: explanations, comparison with full attention, and fallback to it."""
