"""Settings of the proxy: flags, files and what they make."""
