"""Lessons: what one shows with the floors below: the worked example, lost updates, figures."""
