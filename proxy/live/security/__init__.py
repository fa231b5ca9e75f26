"""Keys, TLS and the checks of who is asking."""
