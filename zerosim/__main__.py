"""``python -m zerosim`` is the command line."""

from zerosim.cli import main

if __name__ == "__main__":
    main()
