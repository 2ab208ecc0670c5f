"""What collectives and plans cost, as one reads it."""
