"""The HTTP service and its page: one model worker, fed by many requests."""
