"""The live proxy: sockets, clocks and engines around the sans-IO core."""
