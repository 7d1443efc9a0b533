"""Who may do what, and how much: principals, authorizer, quotas."""
