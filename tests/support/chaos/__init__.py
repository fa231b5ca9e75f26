"""The whole proxy in virtual time, in front of emulated engines, with faults drawn from a seed."""
