"""What a command line says of the clients, without loading them."""

DEFAULT_ADDRESS = "127.0.0.1:7072"
# Of the chunks in a prompt.
ORDER_NAMES = ("document", "rank", "rank_reversed")
