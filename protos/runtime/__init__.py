"""The services' common runtime: servers, channels, TLS, settings, errors."""
