"""`fusionkv eval` and `fusionkv check`: what recipes answer, on tasks, questions and models."""
