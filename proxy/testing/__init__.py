"""Instruments of the tests and scripts: virtual time, seeded faults, soak runs. Not in the wheel."""
