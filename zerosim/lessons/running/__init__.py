"""A reader's own program, run here or on processes of their own."""
