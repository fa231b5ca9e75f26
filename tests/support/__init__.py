"""What tests and scripts share: virtual time, seeded faults, soak runs."""
