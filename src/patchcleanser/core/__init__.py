"""Threats, masks, proofs and verdicts, in integers and numpy arrays. Nothing here needs torch."""
