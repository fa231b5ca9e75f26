"""The driver of the sans-IO scheduler."""
