"""The command line: one small function for each command; what a command does stands in a lesson or in the doctor."""

from zerosim.cli import bench, lessons, lists, predictions, programs, puzzles, shell, tools, training
from zerosim.cli.shell import app, command, main

__all__ = ["app", "bench", "command", "lessons", "lists", "main", "predictions", "programs", "puzzles", "shell",
           "tools", "training"]
