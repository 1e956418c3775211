"""`fusionkv eval` and `fusionkv check`: the answer quality of recipes, on tasks, questions and models."""
