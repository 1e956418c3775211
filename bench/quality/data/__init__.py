"""What is asked: data sets, tasks, prompts, and the passages that neighbours come from."""
