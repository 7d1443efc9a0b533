"""The metadata log and how its records become committed."""
