"""`python -m covey`: the same as the `covey` command."""

from covey.cli import main

if __name__ == "__main__":
    main()
