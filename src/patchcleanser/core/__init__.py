"""Integers and facts: threats, masks, proofs and verdicts. Nothing here needs torch."""
