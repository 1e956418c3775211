"""Defaults of the clients, for the command line, which does not load them."""

DEFAULT_ADDRESS = "127.0.0.1:7072"
# Orders of the chunks in a prompt.
ORDER_NAMES = ("document", "rank", "rank_reversed")
