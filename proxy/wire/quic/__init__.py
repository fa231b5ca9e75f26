"""QUIC: streams in a chosen order, datagrams to connections, a link to try them on. Needs the extra `h3`."""
