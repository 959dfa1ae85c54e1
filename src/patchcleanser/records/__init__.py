"""A run on disk: rows, manifest, checksums, and what they show."""
