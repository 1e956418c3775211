"""Python clients of the gateway."""
