"""A run on disk: rows, manifest, checksums, and what follows from them."""
