"""The proxy: its scheduling core, the simulator that drives the core, and the command line."""
