"""How a setting is declared, read from flags and files, and checked."""
