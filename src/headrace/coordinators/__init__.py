"""Coordinators: state machines whose records lie in an internal topic, and the runtime that stores and replays them."""
