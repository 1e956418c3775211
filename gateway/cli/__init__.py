"""The command-line interface, `fusionkv`."""
