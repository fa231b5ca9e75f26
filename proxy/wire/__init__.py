"""HTTP/1.1 on both sides of the proxy: strict server, keep-alive client, SSE scanner."""
