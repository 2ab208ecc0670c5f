"""The worked example: four weights on two ranks, run, told and printed."""
