"""`python -m patchcleanser` is the command line."""

from patchcleanser.cli.app import main

if __name__ == "__main__":
    main()
