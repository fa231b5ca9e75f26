"""The proxy's records about itself: metrics, logs and snapshots."""
