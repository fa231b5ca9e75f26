"""HTTP/3 on both sides: a server in front of an application, and a client. Needs the extra `h3`."""
