"""The proxy as a process between clients that leave and engines that fail: what is left behind?"""
