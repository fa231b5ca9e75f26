"""Bodies and answers of the APIs: pure functions and parsers, without sockets."""
