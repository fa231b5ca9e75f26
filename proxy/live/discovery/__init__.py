"""Engines that come and go: where they are found, and who registers and drains them."""
