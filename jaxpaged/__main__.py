"""`python -m jaxpaged`: the command line."""

from jaxpaged.cli import main

if __name__ == "__main__":
    main()
