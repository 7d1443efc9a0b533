"""The broker process: listener, sessions, router, handlers, composition root."""
