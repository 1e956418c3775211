"""Authentication, roles, tenants and quotas of the gateway's callers."""
