"""Python clients of the gateway, and their defaults, for the command line, which does not load them."""

DEFAULT_ADDRESS = "127.0.0.1:7072"
# What to look at if a gateway can't be reached.
UNREACHED_HINT = "is `fusionkv serve all` running? is the address right?"
# Orders of the chunks in a prompt.
ORDER_NAMES = ("document", "rank", "rank_reversed", "ends", "prefix")
