"""Raft for the metadata log: a pure core, the storage it needs, and the driver that joins the two."""
