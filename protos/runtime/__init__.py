"""What all services need to speak the contract: servers, channels, TLS, settings, errors."""
