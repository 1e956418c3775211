"""Who calls, what they may do, and how much: tokens, roles, tenants, quotas."""
