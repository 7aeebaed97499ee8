"""`python -m kvd` is `kvd`."""

import sys

from kvd.cli import main

if __name__ == "__main__":
    sys.exit(main())
