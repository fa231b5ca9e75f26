"""Engines that come and go: where they are found, and what registers and drains them."""
