"""A GPT trained on a text, and the same training several times side by side."""
