"""What the proxy records about itself: metrics, logs and snapshots."""
