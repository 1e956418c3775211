"""The fusion workers behind a gateway, and which one answers what."""
