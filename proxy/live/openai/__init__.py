"""What bodies and answers mean: pure functions and parsers, without sockets."""
