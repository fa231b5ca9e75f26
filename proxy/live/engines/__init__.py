"""The engines behind the proxy: which there are, how they do, and what they serve."""
