"""``python -m penstock``: the ``penstock`` command, with the interpreter that runs it."""

from penstock.cli import main

if __name__ == "__main__":
    main()
