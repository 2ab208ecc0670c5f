"""Numbers: formats, rounding, and the arithmetic that rounds like the hardware's. Imports nothing of zerosim."""
