"""Metadata records, the immutable image built from them, and the controller's decisions (pure)."""
