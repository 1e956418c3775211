"""An entry's life: written, read, promoted, evicted."""
