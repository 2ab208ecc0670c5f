"""Ranks in processes of their own: control messages, TCP for them, verdicts on deadlocks."""
