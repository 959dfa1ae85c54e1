"""The same work on a Ray cluster; the only package that imports ray."""
