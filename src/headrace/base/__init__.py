"""Foundations that every layer may use: errors, settings, clock, identifiers, logging. Imports no other layer."""
