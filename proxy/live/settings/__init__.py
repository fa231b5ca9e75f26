"""Settings: each is declared once, and flags, files, help and configuration are made from that."""
