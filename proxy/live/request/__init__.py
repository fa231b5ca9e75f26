"""The life of one request: its legs, failures and retries."""
