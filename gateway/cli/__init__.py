"""The command `fusionkv`."""
