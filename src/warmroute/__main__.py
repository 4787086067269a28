"""`python -m warmroute`: the command, whatever its module is called."""

import sys

from warmroute.app.main import main

if __name__ == "__main__":
    sys.exit(main())
