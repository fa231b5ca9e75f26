"""The sans-IO scheduling core: no socket, no clock and no event loop of its own."""
