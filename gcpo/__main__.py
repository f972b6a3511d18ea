"""``python -m gcpo``: the command line."""

import sys

from gcpo.cli import main

if __name__ == "__main__":
    sys.exit(main())
