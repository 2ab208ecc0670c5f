"""Ranks in processes of their own, whatever carries their arrays: notes, verdicts on deadlocks, and TCP for notes."""
