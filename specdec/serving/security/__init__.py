"""Who may call a service: its certificates, the certificates of its callers, and the tokens of its clients."""
