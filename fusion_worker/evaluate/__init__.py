"""`fusionkv eval`, `check` and `size`: the quality of recipes on tasks, questions and models, and the bytes of KV."""
