"""Access to entries for processes on the same machine, by shared memory and files."""
