"""`python -m app.providers.simulator`; see `command`."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
