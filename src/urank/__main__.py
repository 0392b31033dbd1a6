"""`python -m urank`, the same as the command `urank`."""

from urank.cli import main

if __name__ == "__main__":
    main()
