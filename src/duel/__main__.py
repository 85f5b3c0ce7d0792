"""`python -m duel` is the command line, where the script `duel` is not on the path."""

import sys

from .cli import main

sys.exit(main())
