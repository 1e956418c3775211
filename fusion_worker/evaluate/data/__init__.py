"""Data of an evaluation: data sets, tasks, prompts, and neighbours of passages."""
