"""The parts that all versions of HTTP share: messages, replies, limits, the SSE scanner."""
