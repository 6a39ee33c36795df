"""`python -m retinue` is `retinue`."""

import sys

from retinue.surfaces.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
