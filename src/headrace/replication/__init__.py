"""Partitions as seen by producers and consumers: leader append, high watermark, waiters."""
