"""What does not depend on the version of HTTP: messages, limits, addresses, the SSE scanner."""
