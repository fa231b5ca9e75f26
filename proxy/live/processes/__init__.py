"""Several processes: relays that own sockets and bodies, and the scheduler that decides for them."""
