"""Run the command line as `python -m persistent_ops`."""

from .cli import main

if __name__ == "__main__":
    main()
