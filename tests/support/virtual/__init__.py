"""An asyncio event loop with virtual time and an in-memory network, for seeded fault runs."""
