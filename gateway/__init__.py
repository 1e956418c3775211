"""The gateway: what applications call. Documents in, answers out; KV bytes never pass it."""
