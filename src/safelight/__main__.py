"""`python -m safelight` is the `safelight` command."""

import sys

from safelight.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
