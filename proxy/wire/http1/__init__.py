"""HTTP/1.1 on both sides of the proxy: a strict server and a keep-alive client."""
