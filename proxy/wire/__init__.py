"""What does not depend on the version of HTTP: messages, replies, limits, the SSE scanner."""
