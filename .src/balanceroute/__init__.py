"""A prefill-decode proxy that balances decode ranks, and the simulator of its scheduling."""

__version__ = "0.1.0"
