"""Mixed precision: what goes wrong in it, what helps, and small trainings that show it."""
