"""The gateway: the service that applications call. It takes documents and returns answers; no KV bytes pass it."""
