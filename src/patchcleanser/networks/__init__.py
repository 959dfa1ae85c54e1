"""Networks of ours, and networks that ask other networks."""
