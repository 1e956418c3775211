"""What retrieval finds."""
